"""What the tests of whole runs share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest


@pytest.fixture
def reads(monkeypatch):
    """Grows by a name with every reading of device arrays; a ``device_get`` of many is one.

    A transfer guard does not see them: on the CPU nothing is transferred.
    """
    found, inside = [], []

    def count(owner, name):
        original = getattr(owner, name)

        def counted(*args, **kwargs):
            is_read = name == "device_get" or isinstance(args[0], jax.Array)
            if inside or not is_read:
                return original(*args, **kwargs)
            found.append(name)
            inside.append(name)
            try:
                return original(*args, **kwargs)
            finally:
                inside.pop()

        monkeypatch.setattr(owner, name, counted)

    for name in ("asarray", "array"):  # they take an array's buffer without asking it
        count(np, name)
    for name in ("array", "float", "int", "bool", "index", "complex"):
        count(type(jnp.zeros(())), f"__{name}__")
    for name in ("item", "tolist"):
        count(type(jnp.zeros(())), name)
    count(jax, "device_get")
    return found
