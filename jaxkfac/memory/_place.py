"""Cast a tree, or move it to its devices, without holding two copies."""

import contextlib
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

# ---------------- moving a tree to its devices


PyTree = Any


def place_once(params: PyTree, sharding: PyTree, *, delete: bool = True) -> PyTree:
    """Move leaves to a sharding, one at a time, deleting each source.

    Args:
        params: Any tree of JAX arrays, random keys, NumPy arrays and numbers.
        sharding: A ``jax.sharding.Sharding`` or a device for all leaves, or a tree of them
            whose structure is a prefix of that of ``params``.
        delete: Whether to delete sources that were moved. Every other array that shares their
            memory becomes unusable too, so use only the result. ``False`` keeps both trees.

    Returns:
        The committed tree. A leaf that is already committed to an equivalent sharding in the same
        memory kind is returned as the same object; an uncommitted one there is committed without a
        copy. NumPy sources cannot be deleted, but the result never shares their memory, so later
        writes to them do not change it.

    Raises:
        ValueError: a leaf is deleted (named), or ``sharding`` does not fit the tree.
        TypeError: an entry of ``sharding`` is neither a sharding nor a device.
        MemoryBudgetError: it would not fit; raised before anything is deleted.

    Memory:
        The tree and one leaf, where old and new sharding share a device; on a device that held
        nothing, only the tree.

    Example:
        >>> import jax, jax.numpy as jnp, jaxkfac as jk
        >>> params = {"kernel": jnp.ones((2, 2))}
        >>> placed = jk.place_once(params, jax.devices()[0])
        >>> placed["kernel"].committed, jk.place_once(placed, jax.devices()[0]) == placed
        (True, True)
    """
    is_one = lambda x: isinstance(x, Sharding | jax.Device)
    shardings = [
        as_sharding(x)
        for x in jax.tree.leaves(
            jax.tree.broadcast(sharding, params, is_leaf=is_one), is_leaf=is_one
        )
    ]

    def target_of(leaf: Any, number: int) -> Target | None:
        target = shardings[number]
        if isinstance(leaf, jax.Array):
            if leaf.committed and lies_at(leaf, target):
                return None
            if not is_numeric_array(leaf):  # a random key, whose size does not matter
                return Target(leaf.shape, np.uint32, target)
            return Target(leaf.shape, leaf.dtype, target)
        value = np.asarray(leaf)
        return Target(value.shape, jax.dtypes.canonicalize_dtype(value.dtype), target)

    # Sources are deleted afterwards, not donated: with donate=True and a sharding on another CPU
    # device, device_put crashes the process (jax 0.10.2) as soon as the source is asked whether it
    # is deleted. A transfer needs its source until the end anyway.
    return replace_once(
        params,
        target_of,
        lambda leaf, t: put_leaf(leaf, t.sharding),
        what="place_once",
        delete=delete,
    )


def as_sharding(place: Any) -> Sharding:
    """The sharding itself; for a device, the sharding that places everything on it."""
    if isinstance(place, Sharding):
        return place
    if isinstance(place, jax.Device):
        return SingleDeviceSharding(place)
    raise TypeError(f"sharding: expected a jax.sharding.Sharding or a device, got {place!r}")


def lies_at(array: jax.Array, sharding: Sharding) -> bool:
    """Whether ``array`` already has the layout and memory kind of ``sharding``."""
    kind = sharding.memory_kind or array.sharding.memory_kind
    return (
        array.sharding.is_equivalent_to(sharding, array.ndim) and array.sharding.memory_kind == kind
    )


def put_leaf(leaf: Any, sharding: Sharding | None, *, gives_up: bool = False) -> jax.Array:
    """Like ``device_put``, with a result that shares no memory with a NumPy source.

    With ``gives_up`` the result may share it: the caller drops the source, the only reference.

    If the devices belong to several processes, each process puts its own shards. Nothing is
    exchanged, so all processes must hold the same values.
    """
    if not (sharding is None or sharding.is_fully_addressable) and _is_here(leaf):
        full_array = np.asarray(leaf)
        copied = lambda index: np.array(full_array[index])
        return jax.make_array_from_callback(full_array.shape, sharding, copied)
    placed = jax.device_put(leaf, sharding)
    if isinstance(leaf, np.ndarray) and not gives_up and _shares_memory(placed, leaf):
        # On the CPU, an aligned source is aliased even with may_alias=False.
        placed = jax.device_put(leaf.copy(), sharding)
    return placed


def _is_here(leaf: Any) -> bool:
    """Whether this process has all of ``leaf`` and NumPy can read it."""
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


# ---------------- casting a tree


def cast_once(params: PyTree, dtype: DTypeLike, *, delete: bool = True) -> PyTree:
    """Convert floating leaves to ``dtype``, one at a time, deleting each source.

    A cast of the whole tree in one program holds both trees, because a buffer of another dtype is
    never donated. Here each leaf is converted and its source deleted before the next one starts.

    Args:
        params: Any tree. Integers, booleans, complex numbers, random keys and Python numbers
            stay unchanged. Leaves that share a buffer (tied weights) share one afterwards.
        dtype: A floating dtype of any width (also float8). Values beyond it become infinite, or
            NaN in a float8 without infinity.
        delete: Whether to delete sources. Every other array that shares their memory becomes
            unusable too, so use only the result. ``False`` keeps both trees.

    Returns:
        The tree. A leaf that already has the dtype is returned as the same object; others keep
        their sharding, memory kind and committedness. NumPy leaves stay NumPy: their sources
        cannot be deleted, and are freed with the last reference. Traced leaves are converted
        inside the program, which manages their memory.

    Raises:
        ValueError: ``dtype`` is not floating, it is float64 while x64 is off, or a leaf is
            deleted (named).
        MemoryBudgetError: it would not fit; raised before anything is deleted.

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
    """The dtype, after checking that it is floating and currently available."""
    dtype = np.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"parameters are cast to a floating dtype, got {dtype}")
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError("float64 needs jax.config.update('jax_enable_x64', True)")
    return dtype


def has_dtype(leaf: Any) -> bool:
    """Whether a leaf is a numeric JAX or NumPy array, not a Python number."""
    return is_numeric_array(leaf) or isinstance(leaf, np.ndarray | np.generic)


def convert(leaf: Any, dtype: Any) -> Any:
    """``leaf`` in another dtype, in the same place."""
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.astype(dtype)
    if not isinstance(leaf, Tracer) and _is_on_host(leaf):
        # NumPy converts it: on an accelerator, a program would be slow on its host memory, and on
        # the CPU a program releases its argument some time after its result exists, so two leaves
        # would be in memory instead of one. The time is about the same.
        converted = aligned_empty(leaf.shape, np.dtype(dtype))
        with np.errstate(over="ignore", invalid="ignore"):  # overflow to infinity, as on a device
            np.copyto(converted, np.asarray(leaf), casting="unsafe")
        with _uncommitted_stays(leaf):
            return jax.device_put(converted, leaf.sharding if leaf.committed else None)
    with _uncommitted_stays(leaf):
        return jax.lax.convert_element_type(leaf, dtype)


def _uncommitted_stays(leaf: Any) -> contextlib.AbstractContextManager[Any]:
    """A context in which JAX leaves an uncommitted array on its device.

    JAX moves it to the default device otherwise, which may be another one by now.
    """
    if isinstance(leaf, Tracer) or leaf.committed or len(leaf.sharding.device_set) > 1:
        return contextlib.nullcontext()
    (device,) = leaf.sharding.device_set
    return jax.default_device(device)


def _is_on_host(leaf: jax.Array) -> bool:
    if len(leaf.sharding.device_set) > 1:
        return False
    (device,) = leaf.sharding.device_set
    return device.platform == "cpu" or "host" in (leaf.sharding.memory_kind or "")


# ---------------- shardings that divide every array among devices, where its shape allows


def divided_shardings(tree: PyTree, mesh: Mesh | AbstractMesh, axes: str | Sequence[str]) -> PyTree:
    """Shardings that divide arrays over one or several axes of a mesh.

    They are for the parameters and the optimizer state of fully sharded training. An array is
    divided along the last of its axes (including stacked ones) whose size the number of devices
    divides. If the product of all ``axes`` divides none, single mesh axes are tried, the largest
    first. Arrays that cannot be divided are replicated: scalars, vectors, and matrices such as the
    factor of an odd number of inputs with the ones of a bias.

    Args:
        tree: Arrays, or their shapes.
        mesh: The mesh.
        axes: Names of mesh axes.

    Returns:
        The tree with a ``NamedSharding`` for each array, for ``jax.device_put`` and for the
        ``out_shardings=`` of ``jax.jit``. Specs have an entry for each axis of the array.

    Raises:
        KeyError: a name is not an axis of the mesh.

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
