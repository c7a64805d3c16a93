"""Several processes: arrays on the devices of all, and what they tell one another."""

import dataclasses
import functools
import os
import warnings
import zlib
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, PyTree

from jaxkfac._errors import ProcessesDisagreeError

# ---------------- joining the processes of a run: what a script calls first, and the command line
# too


# A process that fails alone leaves after the first, and the others notice after the second.
SHUTDOWN_SECONDS, HEARTBEAT_SECONDS = 30, 60


def join_processes(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    **options: Any,
) -> None:
    """Join the other processes of a run, as ``jaxkfac train --coordinator`` does.

    This is ``jax.distributed.initialize`` with three differences. A process that fails waits 30
    seconds for the others, where JAX's own limit is 300. A process that has been killed is missed
    after 60 seconds, where JAX's own limit is 100. JAX's preemption notifier is off, which
    takes SIGTERM away from Python: a scheduler's SIGTERM then does what the script says, and
    ends it where it says nothing. Call it before anything else of JAX's.

    Args:
        coordinator_address: ``HOST:PORT`` of process 0; without it JAX asks the cluster.
        num_processes: How many there are.
        process_id: Which one this is, from 0.
        **options: Further ones of ``jax.distributed.initialize``, which go before these.

    Raises:
        RuntimeError: JAX has looked for its devices already.
        ValueError: there is no address, and no cluster that JAX knows.

    Warns:
        UserWarning: in process 0, where the processes are on CPUs and ``PJRT_NPROC`` is not 1.
    """
    initialize_distributed(
        coordinator_address=coordinator_address,
        num_processes=num_processes,
        process_id=process_id,
        **options,
    )
    if jax.process_index() == 0 and (note := note_on_cpus(jax.devices()[0].platform)):
        warnings.warn(note, stacklevel=2)


def initialize_distributed(**options: Any) -> None:
    """``jax.distributed.initialize`` with shorter limits, and SIGTERM left to Python."""
    jax.config.update("jax_enable_preemption_service", False)
    limits: dict[str, Any] = {
        "shutdown_timeout_seconds": SHUTDOWN_SECONDS,
        "heartbeat_timeout_seconds": HEARTBEAT_SECONDS,
    }
    jax.distributed.initialize(**(limits | options))


def note_on_cpus(platform: str) -> str:
    """What to do about gloo's aborts between processes on CPUs, or nothing."""
    if platform != "cpu" or os.environ.get("PJRT_NPROC") == "1":
        return ""
    return (
        "processes on CPUs exchange through gloo; if it ends one with 'collective mismatch', set "
        "PJRT_NPROC=1 in the environment of each process, or start one with many devices"
    )


# ----------------


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


# ---------------- whether all processes of a run feed the batch that they should


def check_same_batch(batch: PyTree, *, local: bool = False) -> None:
    """Refuse a run whose processes feed different batches. Call it once, with the first batch.

    JAX does not notice: each process goes on with its own rows, and parameters that should be
    equal are not. Every process has to call it. With one process it does nothing.

    Args:
        batch: A tree of arrays. Every process is to hold the same one, as where
            ``jax.device_put(batch, sharding)`` follows.
        local: Whether each process holds rows of its own instead, as for
            ``jax.make_array_from_process_local_data``: then structure, shapes and dtypes are
            compared, and values are not.

    Raises:
        ProcessesDisagreeError: structure, shapes or dtypes differ, or a digest of the values
            does; or another process has failed meanwhile.
        ValueError: an array lies on several processes already, so its values cannot be read here.

    Example:
        >>> import jax.numpy as jnp, jaxkfac as jk
        >>> jk.check_same_batch((jnp.ones((8, 3)), jnp.zeros(8, int)))
    """
    group = ProcessGroup.everywhere()
    if group is None:
        return
    leaves, tree = jax.tree.flatten(batch)
    error = None
    if any(isinstance(x, jax.Array) and not x.is_fully_addressable for x in leaves):
        error = ValueError(
            "check_same_batch: the batch lies on several processes already; give the arrays that "
            "this process has read"
        )
    arrays: list[Any] = [] if error else [np.asarray(x) for x in leaves]
    forms = [(x.shape, x.dtype.name) for x in arrays]
    group.agree("the first batch, its structure, shapes and dtypes", f"{tree} {forms}", error)
    if not local:
        digests = [zlib.crc32(np.ascontiguousarray(x).view(np.uint8).data) for x in arrays]
        group.agree("the first batch, its values", repr(digests))
