"""Find arrays that are in memory twice, such as a tree and its cast copy."""

import dataclasses
import functools
import gc
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from jaxkfac.memory._budget import ByteSize, bytes_text, parse_bytes
from jaxkfac.memory._leaves import Place, is_numeric_array, places_of

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Duplicate:
    """One set of values in several places in memory.

    Attributes:
        names: Names of the arrays with these values, each in separate memory.
        wasted_bytes: Bytes of all of them except the smallest, over all devices.
    """

    names: tuple[str, ...]
    wasted_bytes: int


@dataclasses.dataclass(frozen=True)
class DuplicateReport:
    """Result of :func:`duplicate_report`; ``print`` shows it as a table.

    Attributes:
        duplicates: Duplicates, the largest waste first.
        looked_at: Number of arrays compared.
        min_bytes: Smaller arrays were skipped.
    """

    duplicates: tuple[Duplicate, ...]
    looked_at: int
    min_bytes: int

    @property
    def wasted_bytes(self) -> int:
        """Wasted bytes of all duplicates together."""
        return sum(duplicate.wasted_bytes for duplicate in self.duplicates)

    def __str__(self) -> str:
        head = (
            f"{len(self.duplicates)} of {self.looked_at} arrays of at least "
            f"{bytes_text(self.min_bytes)} are held more than once"
        )
        if not self.duplicates:
            return head.replace("0 of", "none of", 1)
        rows = [
            f"{bytes_text(duplicate.wasted_bytes):>10}  {' = '.join(duplicate.names)}"
            for duplicate in self.duplicates
        ]
        return "\n".join([f"{head}; {bytes_text(self.wasted_bytes)} could go:", *rows])


def duplicate_report(
    *, min_bytes: ByteSize = 1 << 20, ignore: Sequence[jax.Array] = (), **trees: PyTree
) -> DuplicateReport:
    """Find live arrays with equal values in different memory, over all dtypes and devices.

    A float32 array and its bfloat16 copy are duplicates: values are compared in the narrower
    dtype (of two 16-bit formats, in that of the array that comes first). Arrays that share a buffer
    count as one. Constant arrays (a new bias, an optimizer's initial moments) are skipped.

    Args:
        min_bytes: Arrays with fewer bytes over all devices are skipped; a number or ``"4MiB"``.
            0 compares all.
        ignore: Arrays to skip unless a tree contains them, such as an earlier
            ``jax.live_arrays()``.
        **trees: Trees whose arrays get names, ``params=params``; other arrays are named by dtype,
            shape and device.

    Returns:
        The report.

    Memory:
        None if both arrays are on the same devices; otherwise one pair of arrays in main memory
        while it is compared.

    Example:
        >>> import jax.numpy as jnp, jaxkfac as jk
        >>> params = {"kernel": jnp.arange(71.0) / 7}
        >>> forgotten = {"kernel": params["kernel"].astype(jnp.bfloat16)}
        >>> report = jk.memory.duplicate_report(min_bytes=142, params=params, old=forgotten)
        >>> [d for d in report.duplicates if "params/kernel" in d.names]
        [Duplicate(names=('params/kernel', 'old/kernel'), wasted_bytes=284)]
    """
    least = parse_bytes(min_bytes, name="min_bytes") if min_bytes else 0
    gc.collect()
    by_shape: dict[Any, list[_Candidate]] = defaultdict(list)
    known_buffers: set[frozenset[Place]] = set()
    for name, array in [*_named(trees, least), *_unnamed(least, ignore)]:
        places = places_of(array)
        if places and places not in known_buffers:
            known_buffers.add(places)
            by_shape[array.shape].append(_Candidate(name, array))
    duplicates = []
    for same_shape in by_shape.values():
        while same_shape:
            first, *remaining = same_shape
            equal = [candidate for candidate in remaining if _are_equal(first, candidate)]
            same_shape = [candidate for candidate in remaining if candidate not in equal]
            if equal and not bool(_is_constant(first.array)):
                sizes = sorted(_bytes(x.array) for x in [first, *equal])
                duplicates.append(Duplicate(tuple(x.name for x in [first, *equal]), sum(sizes[1:])))
    duplicates.sort(key=lambda duplicate: -duplicate.wasted_bytes)
    return DuplicateReport(tuple(duplicates), len(known_buffers), least)


class _Candidate:
    """An array and a few of its entries, which quickly rule out most others of its shape."""

    def __init__(self, name: str, array: jax.Array) -> None:
        self.name, self.array = name, _on_automatic_axes(array)

    @functools.cached_property
    def probe(self) -> np.ndarray:
        return np.asarray(_probe(self.array))


def _named(trees: dict[str, PyTree], min_bytes: int) -> list[tuple[str, jax.Array]]:
    return [
        (jax.tree_util.keystr(path, simple=True, separator="/"), _part_here(leaf))
        for name, tree in trees.items()  # in the caller's order, which dictionary leaves lose
        for path, leaf in jax.tree_util.tree_leaves_with_path({name: tree})
        if _is_large(leaf, min_bytes)
    ]


def _part_here(array: jax.Array) -> jax.Array:
    """The array, or this process's first shard of it, which needs no other process."""
    return array if array.is_fully_addressable else array.addressable_shards[0].data


def _unnamed(min_bytes: int, ignore: Sequence[jax.Array]) -> list[tuple[str, jax.Array]]:
    ignored = {id(x) for x in ignore}
    return [
        (f"{x.dtype}{list(x.shape)} on {', '.join(map(str, _devices(x)))} (live {i})", x)
        for i, x in enumerate(jax.live_arrays())
        if id(x) not in ignored and _is_large(x, min_bytes) and x.is_fully_addressable
    ]


def _is_large(leaf: Any, min_bytes: int) -> bool:
    return is_numeric_array(leaf) and not leaf.is_deleted() and _bytes(leaf) >= min_bytes


def _devices(array: jax.Array) -> list[Any]:
    return sorted(array.sharding.device_set, key=str)


def _bytes(array: jax.Array) -> int:
    return sum(shard.data.nbytes for shard in array.addressable_shards)


def _are_equal(first: _Candidate, second: _Candidate) -> bool:
    dtypes = first.array.dtype, second.array.dtype
    if dtypes[0] != dtypes[1] and not all(jnp.issubdtype(d, jnp.floating) for d in dtypes):
        return False  # integers and floats may be equal without being copies of each other
    dtype = min(*dtypes, key=lambda d: d.itemsize)
    if not _equal_entries(first.probe.astype(dtype), second.probe.astype(dtype)).all():
        return False
    shardings = first.array.sharding, second.array.sharding
    if len({(_in_order(x), x.memory_kind) for x in shardings}) == 1:
        return bool(_equal(first.array, second.array, dtype))
    first_values, second_values = (
        np.asarray(_alias(x)).astype(dtype) for x in (first.array, second.array)
    )
    return bool(_equal_entries(first_values, second_values).all())


@functools.partial(jax.jit, static_argnums=2)
def _equal(first: jax.Array, second: jax.Array, dtype: Any) -> jax.Array:
    return jnp.all(_equal_entries(first.astype(dtype), second.astype(dtype)))


def _equal_entries(first: Any, second: Any) -> Any:
    """Elementwise equality for JAX or NumPy arrays, with NaN equal to NaN."""
    return (first == second) | ((first != first) & (second != second))


@jax.jit
def _probe(array: jax.Array) -> jax.Array:
    """Up to 32 entries, spread over every axis."""
    positions = jnp.arange(32)
    return array[tuple((positions * 7919 + 1) % n for n in array.shape)]


@jax.jit
def _is_constant(array: jax.Array) -> jax.Array:
    return jnp.all(_equal_entries(array, array[(0,) * array.ndim]))


def _alias(array: jax.Array, sharding: jax.sharding.Sharding | None = None) -> jax.Array:
    """A temporary array on the same buffers; the original would keep NumPy's copy of its values."""
    shards = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, sharding or array.sharding, shards)


def _on_automatic_axes(array: jax.Array) -> jax.Array:
    """The array, or its alias if mesh axes are explicit: a gather would need a sharding there."""
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding) or not any(
        kind == AxisType.Explicit for kind in sharding.mesh.axis_types
    ):
        return array
    old: Any = sharding.mesh  # of an array it has devices
    mesh = Mesh(old.devices, old.axis_names, axis_types=(AxisType.Auto,) * len(old.axis_names))
    kind = sharding.memory_kind
    return _alias(array, NamedSharding(mesh, sharding.spec, memory_kind=kind))


def _in_order(sharding: jax.sharding.Sharding) -> tuple[Any, ...]:
    """The devices, in the order in which a program would run on them."""
    mesh: Any = sharding.mesh if isinstance(sharding, NamedSharding) else None
    return tuple(sharding.device_set if mesh is None else mesh.devices.flat)
