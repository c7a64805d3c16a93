"""Convert a tree to a dtype without a second copy of it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike

from jaxkfac.memory._aligned import aligned_empty
from jaxkfac.memory._leaves import Target, is_numeric_array, replace_once

PyTree = Any


def cast_once(params: PyTree, dtype: DTypeLike, *, delete: bool = True) -> PyTree:
    """Convert floating leaves to ``dtype``, one at a time, deleting each source.

    A cast of the whole tree in one program holds both trees: a buffer of another dtype is never
    donated. Here a leaf is converted, waited for, and its source deleted before the next one.

    Args:
        params: Any tree. Integers, booleans, complex numbers, random keys and Python numbers are
            left alone. Leaves that share a buffer (tied weights) share one afterwards.
        dtype: Floating, of any width (float8 too).
        delete: Delete sources. Every other array that shares their memory dies with them, so
            go on with the result alone. ``False`` keeps both trees.

    Returns:
        The tree. A leaf that has the dtype is the same object; others keep their sharding and
        memory kind, and whether they are committed. NumPy leaves stay NumPy: their sources
        cannot be deleted, and go when the last reference does. Traced leaves are converted
        inside the program, which owns its memory.

    Raises:
        ValueError: ``dtype`` is not floating, it is float64 while x64 is off, or a leaf is
            deleted, by name.
        MemoryBudgetError: before anything is consumed, if it would not fit.

    Memory:
        The tree and one leaf.

    Example:
        >>> import jax.numpy as jnp, jaxkfac as jk
        >>> params = {"kernel": jnp.ones((2, 2)), "step": jnp.array(3)}
        >>> small = jk.cast_once(params, jnp.bfloat16)
        >>> small["kernel"].dtype, small["step"] is params["step"], params["kernel"].is_deleted()
        (dtype(bfloat16), True, True)
    """
    dtype = checked_dtype(dtype)

    def target_of(leaf: Any, _: int) -> Target | None:
        if not has_dtype(leaf) or not jnp.issubdtype(leaf.dtype, jnp.floating):
            return None
        if leaf.dtype == dtype:
            return None
        on_device = isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
        return Target(leaf.shape, dtype, leaf.sharding if on_device else None)

    leaves = jax.tree.leaves(params)
    if any(isinstance(leaf, Tracer) for leaf in leaves):
        return jax.tree.map(lambda x: x if target_of(x, 0) is None else convert(x, dtype), params)
    return replace_once(
        params, target_of, lambda leaf, t: convert(leaf, t.dtype), what="cast_once", delete=delete
    )


def checked_dtype(dtype: DTypeLike) -> np.dtype:
    """A floating dtype that arrays can have now."""
    dtype = np.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"parameters are cast to a floating dtype, got {dtype}")
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError("float64 needs jax.config.update('jax_enable_x64', True)")
    return dtype


def has_dtype(leaf: Any) -> bool:
    """Whether a leaf is an array of numbers, JAX's or NumPy's, and no Python number."""
    return is_numeric_array(leaf) or isinstance(leaf, np.ndarray | np.generic)


def convert(leaf: Any, dtype: Any) -> Any:
    """``leaf`` in another dtype, where it is."""
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.astype(dtype)
    if not isinstance(leaf, Tracer) and _is_on_host(leaf):
        # By NumPy: on an accelerator this would be a slow program on its host memory, and on the
        # CPU a program lets go of its argument some time after its result is there, so that
        # two leaves and not one would be in flight. It is about as quick.
        converted = aligned_empty(leaf.shape, np.dtype(dtype))
        with np.errstate(over="ignore", invalid="ignore"):  # infinity, as on any device
            np.copyto(converted, np.asarray(leaf), casting="unsafe")
        return jax.device_put(converted, leaf.sharding if leaf.committed else None)
    return jax.lax.convert_element_type(leaf, dtype)


def _is_on_host(leaf: jax.Array) -> bool:
    if len(leaf.sharding.device_set) > 1:
        return False
    (device,) = leaf.sharding.device_set
    return device.platform == "cpu" or "host" in (leaf.sharding.memory_kind or "")
