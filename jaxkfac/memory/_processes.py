"""Several processes: arrays on the devices of all, and what they tell one another."""

import dataclasses
import functools
import zlib
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array

from jaxkfac._errors import ProcessesDisagreeError

_TEXT = 512  # bytes of a message; every process sends as many


def whole_here(x: Any) -> Any:
    """``x`` as an array that this process can read, to be copied to the host.

    What lies on one device, or whole on each, is the same buffer as another array object: JAX
    keeps the NumPy copy of an array with the array, which the caller may hold for long.

    An array on devices of several processes, each with a part of it, becomes whole on each. All
    of these processes call this: they exchange their parts.

    Raises:
        ValueError: ``x`` is on several processes, and its sharding has no mesh.
    """
    if not isinstance(x, jax.Array):
        return x
    if x.is_fully_replicated:
        return x.addressable_data(0) if x.addressable_shards else x
    if x.is_fully_addressable:
        return x  # put together on the host
    if not isinstance(x.sharding, NamedSharding):
        raise ValueError(
            f"an array of shape {x.shape} lies on devices of several processes as {x.sharding}, "
            "which names no mesh; give the function that made it out_shardings= of NamedSharding"
        )
    _wait_on_cpu(x.sharding)
    whole = _placed(x, sharding=NamedSharding(x.sharding.mesh, PartitionSpec()))
    _wait_on_cpu(x.sharding)
    return whole.addressable_data(0)


def _wait_on_cpu(sharding: Sharding) -> None:
    """Wait for every program that may exchange something.

    The CPU runs programs that do not depend on one another at the same time, in an order of its
    own, and gloo takes what comes first for what it waits for: two processes then end with "Is
    there a distributed collective mismatch in your code?" (jax 0.10.2). An accelerator runs its
    programs in the order of their dispatch.
    """
    if next(iter(sharding.device_set)).platform == "cpu":
        jax.block_until_ready(jax.live_arrays())


@functools.partial(jax.jit, static_argnames="sharding")
def _placed(x: Array, *, sharding: NamedSharding) -> Array:
    if sharding.mesh.explicit_axes:
        return jax.sharding.reshard(x, sharding)
    return jax.lax.with_sharding_constraint(x, sharding)


@dataclasses.dataclass(frozen=True)
class ProcessGroup:
    """The processes that an array lies on.

    Every method is called by all of them, in the same order, and returns once all have called.

    Attributes:
        devices: One of each process, in the order of the processes.
    """

    devices: tuple[Any, ...]

    @classmethod
    def of(cls, sharding: Sharding | None) -> "ProcessGroup | None":
        """Those of a sharding, or ``None`` where all of its devices are of this process."""
        if sharding is None or sharding.is_fully_addressable:
            return None
        first: dict[int, Any] = {}
        for device in sorted(sharding.device_set, key=lambda d: d.id):
            first.setdefault(device.process_index, device)
        return cls(tuple(first[process] for process in sorted(first)))

    @classmethod
    def everywhere(cls) -> "ProcessGroup | None":
        """All processes, or ``None`` where there is one."""
        mesh = Mesh(np.array(jax.devices()), ("device",))
        return cls.of(NamedSharding(mesh, PartitionSpec()))

    @property
    def rank(self) -> int:
        """The place of this process among them."""
        return [device.process_index for device in self.devices].index(jax.process_index())

    def gathered(self, x: np.ndarray) -> np.ndarray:
        """``(processes, ...)``: the array of each, of one shape and dtype."""
        return self._collected(x, add=False)

    def combined(self, x: np.ndarray) -> np.ndarray:
        """The array whose every element is not zero in at most one process.

        Bits are added, so that what arrives is what was sent, to the last one.
        """
        bits = np.ascontiguousarray(x).reshape(-1).view(np.uint32)
        return self._collected(bits, add=True).view(x.dtype).reshape(x.shape)

    def told(self, text: str) -> list[str]:
        """What each process says, cut to 512 bytes."""
        sent = np.frombuffer(text.encode()[:_TEXT].ljust(_TEXT, b"\0"), np.uint8)
        return [row.tobytes().rstrip(b"\0").decode(errors="ignore") for row in self.gathered(sent)]

    def agree(self, doing: str, about: str, error: BaseException | None = None) -> None:
        """Go on together, or fail together.

        Args:
            doing: For errors.
            about: What must be the same in every process.
            error: What this process fails with.

        Raises:
            ProcessesDisagreeError: another process has failed, or has another ``about``.
            BaseException: ``error``, once the others know of it.
        """
        failed = "" if error is None else f"{type(error).__name__}: {error}"
        sent = self.told(f"{zlib.crc32(about.encode()):08x}{failed}")
        if error is not None:
            raise error
        numbers = [device.process_index for device in self.devices]
        for process, text in zip(numbers, sent, strict=True):
            if text[8:]:
                raise ProcessesDisagreeError(f"{doing}: process {process} failed with {text[8:]}")
        if len({text[:8] for text in sent}) > 1:
            groups: dict[str, list[int]] = {}
            for process, text in zip(numbers, sent, strict=True):
                groups.setdefault(text[:8], []).append(process)
            raise ProcessesDisagreeError(
                f"{doing}: processes {' and '.join(map(str, groups.values()))} do not have the "
                "same there; run the same program with the same options in each"
            )

    def _collected(self, x: np.ndarray, *, add: bool) -> np.ndarray:
        mesh = Mesh(np.array(self.devices), ("process",))
        rows = NamedSharding(mesh, PartitionSpec("process"))
        _wait_on_cpu(rows)
        shape = (len(self.devices), *x.shape)
        mine = jax.device_put(x[None], self.devices[self.rank])
        with jax.set_mesh(mesh):  # the caller's may be another
            all_rows = jax.make_array_from_single_device_arrays(shape, rows, [mine])
            return np.asarray(_replicated(all_rows, mesh=mesh, add=add))


@functools.partial(jax.jit, static_argnames=("mesh", "add"))
def _replicated(rows: Array, *, mesh: Mesh, add: bool) -> Array:
    x = rows.sum(0, dtype=rows.dtype) if add else rows
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec()))


def in_equal_shares(costs: list[int], count: int) -> list[int]:
    """Which of ``count`` processes or devices does what: the costliest first, to the least busy.

    None has more than its equal share of the sum and the largest one.

    Args:
        costs: Of each piece of work.
        count: How many there are to do it.

    Example:
        >>> in_equal_shares([1, 8, 1, 5, 2], 2)
        [1, 0, 0, 1, 1]
    """
    owners, loads = [0] * len(costs), [0] * count
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += costs[i]
    return owners
