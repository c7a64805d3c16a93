"""Move a tree to its devices without a second copy of it."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from jaxkfac.memory._leaves import Target, is_numeric_array, replace_once

PyTree = Any


def place_once(params: PyTree, sharding: PyTree, *, delete: bool = True) -> PyTree:
    """Move leaves to where they belong, one at a time, deleting each source.

    Args:
        params: Any tree of arrays: JAX's, random keys, NumPy's and numbers.
        sharding: A ``jax.sharding.Sharding`` or a device, for all leaves, or a tree of them
            whose structure is a prefix of that of ``params``.
        delete: Delete sources that were moved. Every other array that shares their memory dies
            with them, so go on with the result alone. ``False`` keeps both trees.

    Returns:
        The tree, committed. A leaf that is committed to an equivalent sharding in the same
        memory kind is the same object. One that lies there uncommitted is committed without a
        copy. NumPy sources cannot be deleted, but the result never shares their memory, so a
        later write into them does not show.

    Raises:
        ValueError: a leaf is deleted, by name, or ``sharding`` does not fit the tree.
        TypeError: something in ``sharding`` is neither a sharding nor a device.
        MemoryBudgetError: before anything is consumed, if it would not fit.

    Memory:
        The tree and one leaf, wherever both old and new places are on one device; on a device
        that held nothing, the tree alone.

    Example:
        >>> import jax, jax.numpy as jnp, jaxkfac as jk
        >>> params = {"kernel": jnp.ones((2, 2))}
        >>> placed = jk.place_once(params, jax.devices()[0])
        >>> placed["kernel"].committed, jk.place_once(placed, jax.devices()[0]) == placed
        (True, True)
    """
    is_one = lambda x: isinstance(x, Sharding | jax.Device)
    wanted = [
        as_sharding(x)
        for x in jax.tree.leaves(
            jax.tree.broadcast(sharding, params, is_leaf=is_one), is_leaf=is_one
        )
    ]

    def target_of(leaf: Any, number: int) -> Target | None:
        target = wanted[number]
        if isinstance(leaf, jax.Array):
            if leaf.committed and lies_at(leaf, target):
                return None
            if not is_numeric_array(leaf):  # a random key: its bytes are not worth counting
                return Target(leaf.shape, np.uint32, target)
            return Target(leaf.shape, leaf.dtype, target)
        value = np.asarray(leaf)
        return Target(value.shape, jax.dtypes.canonicalize_dtype(value.dtype), target)

    # Deleted afterwards rather than donated: a source that device_put was given with
    # donate=True and a sharding of another CPU device crashes the process (jax 0.10.2) as soon
    # as it is asked whether it is deleted. A transfer needs its source until the end anyway.
    return replace_once(
        params,
        target_of,
        lambda leaf, t: put_leaf(leaf, t.sharding),
        what="place_once",
        delete=delete,
    )


def as_sharding(place: Any) -> Sharding:
    """A device stands for the sharding that has everything on it."""
    if isinstance(place, Sharding):
        return place
    if isinstance(place, jax.Device):
        return SingleDeviceSharding(place)
    raise TypeError(f"sharding: expected a jax.sharding.Sharding or a device, got {place!r}")


def lies_at(array: jax.Array, sharding: Sharding) -> bool:
    """Whether ``array`` has the layout over devices and the memory kind of ``sharding``."""
    kind = sharding.memory_kind or array.sharding.memory_kind
    return (
        array.sharding.is_equivalent_to(sharding, array.ndim) and array.sharding.memory_kind == kind
    )


def put_leaf(leaf: Any, sharding: Sharding | None, *, gives_up: bool = False) -> jax.Array:
    """``device_put``, whose result shares no memory with a NumPy source.

    With ``gives_up`` it may: the caller has no more use for the source, which is the only one.

    From a process to the devices of several each puts its own part: nothing is exchanged, so that
    what the processes hold must be the same.
    """
    if not (sharding is None or sharding.is_fully_addressable) and _is_here(leaf):
        whole = np.asarray(leaf)
        copied = lambda index: np.array(whole[index])
        return jax.make_array_from_callback(whole.shape, sharding, copied)
    placed = jax.device_put(leaf, sharding)
    if isinstance(leaf, np.ndarray) and not gives_up and _shares_memory(placed, leaf):
        # An aligned source is taken as it is on the CPU, may_alias=False or not.
        placed = jax.device_put(leaf.copy(), sharding)
    return placed


def _is_here(leaf: Any) -> bool:
    """Whether this process has all of ``leaf``, and NumPy reads it."""
    if isinstance(leaf, jax.Array):
        return leaf.is_fully_addressable and is_numeric_array(leaf)
    return isinstance(leaf, np.ndarray)


def _shares_memory(placed: jax.Array, source: np.ndarray) -> bool:
    start, stop = np.lib.array_utils.byte_bounds(source)
    return any(
        shard.device.platform == "cpu"
        and shard.data.size > 0
        and start <= shard.data.unsafe_buffer_pointer() < stop
        for shard in placed.addressable_shards
    )
