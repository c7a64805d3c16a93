"""Cast a tree, or move it to its devices, without a second copy of it."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import (
    AbstractMesh,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)
from jax.typing import DTypeLike

from jaxkfac.memory._leaves import Target, aligned_empty, is_numeric_array, replace_once

# ---------------- move a tree to its devices without a second copy of it


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


# ---------------- convert a tree to a dtype without a second copy of it


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


# ---------------- shardings that divide every array among devices, where its shape lets them


def divided_shardings(tree: PyTree, mesh: Mesh | AbstractMesh, axes: str | Sequence[str]) -> PyTree:
    """Where arrays lie that are divided among the devices of one mesh axis, or of several.

    For parameters and an optimizer's state of fully sharded training. An array is divided along
    the last of its axes that the number of devices divides, a stack's among them. Where none is
    divided by the devices of all ``axes``, those of a single one are tried, the most first. What
    cannot be divided so is whole on every device: numbers and vectors, and matrices such as the
    factor of an odd number of inputs and the ones of a bias.

    Args:
        tree: Arrays, or their shapes.
        mesh: The mesh.
        axes: Names of its axes.

    Returns:
        The tree with a ``NamedSharding`` for each array, as ``jax.device_put`` and the
        ``out_shardings=`` of ``jax.jit`` take it. Specs have an entry for each axis of the array.

    Raises:
        KeyError: a name that is no axis of the mesh.

    Example:
        >>> import jax, jax.numpy as jnp, jaxkfac as jk
        >>> params = {"kernel": jnp.ones((4, 6)), "bias": jnp.ones(6)}
        >>> mesh = jax.sharding.AbstractMesh((2,), ("data",))  # in a program jax.make_mesh
        >>> places = jk.memory.divided_shardings(params, mesh, "data")
        >>> tuple(places["kernel"].spec), tuple(places["bias"].spec)
        ((None, 'data'), (None,))
    """
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    singles = sorted(names, key=lambda name: -mesh.shape[name])
    tried = [names, *((name,) for name in singles if len(names) > 1)]

    def of(x: Any) -> NamedSharding:
        entries: list[Any] = [None] * len(x.shape)
        for group in tried if len(x.shape) > 1 else ():
            count = math.prod(mesh.shape[name] for name in group)
            fitting = [i for i, n in enumerate(x.shape) if count > 1 and n and n % count == 0]
            if fitting:
                entries[fitting[-1]] = group if len(group) > 1 else group[0]
                break
        return NamedSharding(mesh, PartitionSpec(*entries))

    return jax.tree.map(of, tree)
