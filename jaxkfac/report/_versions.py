"""Which software made a result."""

import importlib.metadata
import platform


def versions() -> dict[str, str]:
    """Versions of Python, of this library and of what decides its numbers."""
    found = {"python": platform.python_version()}
    for name in ("jaxkfac", "jax", "jaxlib", "flax", "optax", "numpy", "orbax-checkpoint"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
