"""Replace the leaves of a tree one at a time, so that a tree never exists twice."""

import dataclasses
import gc
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import jax
import numpy as np

from jaxkfac.memory._budget import require

# ---------------- NumPy memory that XLA on the CPU uses without copying


_ALIGNMENT = 64  # bytes; XLA requires this alignment of a buffer


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialized array in its own aligned memory."""
    nbytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + nbytes].view(dtype).reshape(shape)


# ---------------- values that are not finite, or are beyond a dtype


_CHUNK = 2**20  # elements that are looked at together
_BITS = {2: np.uint16, 4: np.uint32, 8: np.uint64}


def check_values(
    tensor: np.ndarray, dtype: np.dtype, name: str, *, may_be_infinite: bool = False
) -> None:
    """Refuse values that are not finite, or would not be after a cast.

    Args:
        tensor: Floating values, as stored.
        dtype: The dtype that they are cast to.
        name: What to call the tensor in an error.
        may_be_infinite: Whether stored infinities and NaN are accepted. Finite values beyond the
            dtype never are.

    Raises:
        ValueError: names the tensor, the value and the dtype.

    Memory:
        1 Mi elements.
    """
    bits = _BITS.get(tensor.dtype.itemsize)
    if bits is None or not tensor.size:  # eight bits fit into every other dtype
        return
    # Without its sign, a floating number's bits are ordered as its magnitude; NaN is the largest.
    # One pass of integers then answers both questions, many times faster than ``isfinite``.
    unsigned = bits(2 ** (8 * tensor.dtype.itemsize - 1) - 1)
    infinite = np.asarray(np.inf, tensor.dtype).view(bits)
    flat = np.ascontiguousarray(tensor).reshape(-1).view(bits)
    for start in range(0, flat.size, _CHUNK):
        magnitudes = flat[start : start + _CHUNK] & unsigned
        if (largest := magnitudes.max()) >= infinite:
            if not may_be_infinite:
                raise ValueError(f"{name} holds NaN or infinity: download it again")
            largest = magnitudes[magnitudes < infinite].max(initial=0)
        value = np.asarray(largest, bits).view(tensor.dtype)
        with np.errstate(over="ignore"):
            is_beyond = tensor.dtype != dtype and not np.isfinite(value.astype(dtype))
        if is_beyond:
            raise ValueError(
                f"{name} holds values up to {float(value):.6g} in magnitude, which {dtype} does "
                "not have: take dtype=bfloat16 or float32"
            )


# ---------------- replacing leaves


PyTree = Any
Place = tuple[Any, int]  # a device and an address on it


@dataclasses.dataclass(frozen=True)
class Target:
    """The shape, dtype and sharding that a leaf is to have."""

    shape: tuple[int, ...]
    dtype: Any
    sharding: jax.sharding.Sharding | None  # None: not on any device

    def bytes_on(self) -> dict[Any, int]:
        """Bytes on each device, without those in an accelerator's host memory."""
        if self.sharding is None:
            return {}
        shard = self.sharding.shard_shape(self.shape)
        return {
            device: int(np.prod(shard, dtype=np.int64)) * np.dtype(self.dtype).itemsize
            for device in self.sharding.addressable_devices
            if device.platform == "cpu" or "host" not in (self.sharding.memory_kind or "")
        }


@dataclasses.dataclass
class _Step:
    """One distinct array: a leaf that stands for it, its target, and its result."""

    leaf: Any
    target: Target | None  # None: the leaf stays as it is
    places: frozenset[Place]
    result: Any = None


def replace_once(
    tree: PyTree,
    target_of: Callable[[Any, int], Target | None],
    replace: Callable[[Any, Target], Any],
    *,
    what: str,
    delete: bool,
) -> PyTree:
    """Map every leaf to its target; a source is deleted before the next leaf is processed.

    Leaves that are one array, or several arrays on one buffer, become one array again. A buffer
    that another leaf or a result still needs is not deleted, because deleting an array takes its
    memory from every array that shares it.

    Args:
        tree: A tree of concrete leaves.
        target_of: Function of a leaf and its number; ``None`` keeps the leaf.
        replace: Function of a leaf and a target that returns the new leaf.
        what: Name of the operation, for errors.
        delete: Whether to delete sources.
    """
    named, structure = jax.tree_util.tree_flatten_with_path(tree)
    steps: dict[Hashable, _Step] = {}
    order: list[_Step] = []
    for number, (path, leaf) in enumerate(named):
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise ValueError(
                f"{what}: the array at {name!r} is deleted; it was donated, or cast or placed "
                "once before: use what that call returned"
            )
        places = places_of(leaf)
        target = target_of(leaf, number)
        key = (_identity(leaf, places), target)
        order.append(steps.setdefault(key, _Step(leaf, target, places)))
    _check_room(steps.values(), what, delete)

    waiting = Counter(place for step in steps.values() for place in step.places)
    needed_places: set[Place] = set()
    for step in steps.values():
        waiting.subtract(step.places)
        source, step.leaf = step.leaf, None
        if step.target is None:
            step.result = source
        else:
            step.result = jax.block_until_ready(replace(source, step.target))
        needed_places |= places_of(step.result)
        if (
            delete
            and step.places
            and not any(p in needed_places or waiting[p] for p in step.places)
        ):
            release(source)
    return structure.unflatten([step.result for step in order])


def release(array: jax.Array) -> None:
    """Delete an array and free its memory now."""
    array.delete()
    # JAX frees memory that XLA took over from NumPy in a callback of Python's garbage collector;
    # collecting the youngest generation is enough.
    gc.collect(0)


def places_of(leaf: Any) -> frozenset[Place]:
    """Device and address of an array's buffers; empty for leaves without a buffer to delete."""
    if not is_numeric_array(leaf) or leaf.size == 0:
        return frozenset()
    return frozenset((s.device, s.data.unsafe_buffer_pointer()) for s in leaf.addressable_shards)


def is_numeric_array(leaf: Any) -> bool:
    """Whether ``leaf`` is a numeric JAX array; random keys are not."""
    return isinstance(leaf, jax.Array) and not jax.dtypes.issubdtype(
        leaf.dtype, jax.dtypes.prng_key
    )


def check_targets(targets: Iterable[Target], what: str) -> None:
    """Raise if there is no room for all ``targets`` together."""
    _check_room([_Step(None, target, frozenset()) for target in targets], what, delete=False)


def _identity(leaf: Any, places: frozenset[Place]) -> Hashable:
    if not places:
        return id(leaf)
    return places, leaf.shape, leaf.dtype, leaf.sharding


def _check_room(steps: Iterable[_Step], what: str, delete: bool) -> None:
    """Raise if the peak of the sequence does not fit on a device, before anything is deleted."""
    current: dict[Any, int] = defaultdict(int)
    most: dict[Any, int] = defaultdict(int)
    for step in steps:
        if step.target is None:
            continue
        for device, nbytes in step.target.bytes_on().items():
            current[device] += nbytes
            most[device] = max(most[device], current[device])
        if delete and step.places:
            source = Target(step.leaf.shape, step.leaf.dtype, step.leaf.sharding)
            for device, nbytes in source.bytes_on().items():
                current[device] -= nbytes
    if any(device.platform == "cpu" for device in most):  # CPU devices share one memory
        cpu = [device for device in most if device.platform == "cpu"]
        most[cpu[0]] = sum(most.pop(device) for device in cpu)
    for device, nbytes in most.items():
        require(
            nbytes,
            device=device,
            what=what,
            instead="use a smaller dtype, a sharding over more devices, or host memory "
            "(sharding.with_memory_kind('pinned_host'))",
        )
