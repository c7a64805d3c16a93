"""Errors of this library, and checks of arguments that raise them."""

import contextlib
import difflib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import ArrayLike

# ---------------- arguments that are refused by name


def one_of(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Refuse a value that is none of the choices."""
    if value not in choices:
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(repr, choices))}")


def at_least_one(**numbers: Any) -> None:
    """Refuse a number below one, NaN, or with a fraction, by its name."""
    for name, number in numbers.items():
        scalar(name, number, "a whole number, at least 1")
        if not number >= 1:
            raise ValueError(f"{name}={number}: expected at least 1")
        if number != math.inf and number != int(number):
            raise ValueError(f"{name}={number}: expected a whole number")


def instance_of(name: str, value: Any, kind: type, remedy: str) -> None:
    """Refuse a value of another type, and say where one of the right type comes from."""
    if not isinstance(value, kind):
        raise TypeError(f"{name}: expected {kind.__name__}, {remedy}, got {named(value)}")


def scalar(name: str, value: Any, expected: str) -> None:
    """Refuse what is not one number; traced, it is one if its shape says so."""
    if not isinstance(value, Tracer | ArrayLike):
        came = f"{value!r}" if value is None or isinstance(value, str) else named(value)
        raise TypeError(f"{name}: expected {expected}, got {came}")
    if shape := jnp.shape(value):
        raise TypeError(f"{name}: expected {expected}, got an array of shape {shape}")


def check_key(key: Any) -> None:
    """Refuse a seed where a key is wanted."""
    dtype = getattr(key, "dtype", None)
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if not typed and not getattr(key, "shape", ()):
        raise TypeError(f"key: expected a key, as jax.random.key(0), got {named(key)}")


def named(value: Any) -> str:
    """What a value is, in a few words."""
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


# ---------------- packages that come with an extra


@contextlib.contextmanager
def installed_by(extra: str, needs: str = "") -> Iterator[None]:
    """Say of a package that cannot be imported inside which extra installs it.

    Args:
        extra: The extra.
        needs: What needs which package; by default the error names the package.

    Raises:
        ModuleNotFoundError: a package is not installed; says how to install it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        what = needs or f"{error.name} is not installed"
        message = f'{what}: pip install "jaxkfac[{extra}]"'
        raise ModuleNotFoundError(message, name=error.name) from None


# ---------------- the errors a caller may want to catch by name


class JaxkfacError(Exception):
    """Base of every error raised by this library itself."""


class UncoveredParameterError(JaxkfacError, ValueError):
    """A parameter meets data in a way that no rule covers."""


class UnknownLayerError(JaxkfacError, ValueError):
    """A layer pattern or layer name matches nothing."""


class LostRowsError(JaxkfacError, ValueError):
    """A mask was given and the rows of a layer use could not be identified."""


class CoupledExamplesError(JaxkfacError, ValueError):
    """Statistics of single examples were asked for, and the model couples its examples."""


class HiddenMarkError(JaxkfacError, ValueError):
    """A mark of outputs stands where a transformation hides its terms."""


class NonFiniteFactorError(JaxkfacError, FloatingPointError):
    """A factor, or its decomposition, holds NaN or infinity."""


class CheckpointMismatchError(JaxkfacError, ValueError):
    """A checkpoint was written by another model."""


class DamagedFileError(JaxkfacError, ValueError):
    """A file does not hold what was written to it."""


class DownloadError(JaxkfacError, RuntimeError):
    """A file could not be fetched, or was not what it should be."""


class ProcessesDisagreeError(JaxkfacError, RuntimeError):
    """Another process of this job failed, or does something else; raised in each of them."""


class CompilerError(JaxkfacError, RuntimeError):
    """Another device's compiler gave no result."""


class CompilerNotFoundError(CompilerError):
    """The compiler that was asked for is not installed."""


def nearest(name: str, known: Iterable[str], *, count: int = 3) -> str:
    """The known names closest to ``name``, quoted and joined, for error messages."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=count, cutoff=0.3) or known[:count]
    return ", ".join(repr(k) for k in close) or "none: there are no layers"
