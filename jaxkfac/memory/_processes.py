"""Several processes: arrays on the devices of all of them, and their communication."""

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

# ---------------- joining the processes of a run


# A failed process leaves after the first time; the others notice a killed one after the second.
SHUTDOWN_SECONDS, HEARTBEAT_SECONDS = 30, 60


def join_processes(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    **options: Any,
) -> None:
    """Join the other processes of a run, as ``jaxkfac train --coordinator`` does.

    This is ``jax.distributed.initialize`` with three differences. A process that fails waits 30
    seconds for the others, instead of JAX's 300. A killed process is noticed after 60 seconds,
    instead of JAX's 100. JAX's preemption notifier, which takes SIGTERM away from Python, is off: a
    scheduler's SIGTERM then runs the script's own handler, or ends the script without one.
    Call this function before any other function of JAX.

    Args:
        coordinator_address: ``HOST:PORT`` of process 0; without it JAX asks the cluster.
        num_processes: Number of processes.
        process_id: Number of this process, from 0.
        **options: Further options of ``jax.distributed.initialize``, which override these.

    Raises:
        RuntimeError: JAX has already looked for its devices.
        ValueError: there is no address, and JAX recognizes no cluster.

    Warns:
        UserWarning: in process 0, if the processes are on CPUs and ``PJRT_NPROC`` is not 1.
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
    """Call ``jax.distributed.initialize`` with shorter limits, leaving SIGTERM to Python."""
    jax.config.update("jax_enable_preemption_service", False)
    limits: dict[str, Any] = {
        "shutdown_timeout_seconds": SHUTDOWN_SECONDS,
        "heartbeat_timeout_seconds": HEARTBEAT_SECONDS,
    }
    jax.distributed.initialize(**(limits | options))


def note_on_cpus(platform: str) -> str:
    """Advice about gloo's aborts between processes on CPUs, or an empty string."""
    if platform != "cpu" or os.environ.get("PJRT_NPROC") == "1":
        return ""
    return (
        "processes on CPUs exchange through gloo; if it ends one with 'collective mismatch', set "
        "PJRT_NPROC=1 in the environment of each process, or start one with many devices"
    )


# ---------------- arrays and messages of several processes


_TEXT = 512  # bytes of a message; every process sends this many


def whole_here(x: Any) -> Any:
    """Make the values of ``x`` readable in this process, for a copy to the host.

    An array on one device, or replicated, is returned as another array object on the same buffer:
    JAX keeps an array's NumPy copy with the array, which the caller may hold for long.

    An array sharded over devices of several processes is replicated first. All of these processes
    must call this function, because they exchange their shards.

    Raises:
        ValueError: ``x`` is on several processes, and its sharding has no mesh.
    """
    if not isinstance(x, jax.Array):
        return x
    if x.is_fully_replicated:
        return x.addressable_data(0) if x.addressable_shards else x
    if x.is_fully_addressable:
        return x  # NumPy assembles it on the host
    if not isinstance(x.sharding, NamedSharding):
        raise ValueError(
            f"an array of shape {x.shape} lies on devices of several processes as {x.sharding}, "
            "which names no mesh; give the function that made it out_shardings= of NamedSharding"
        )
    _wait_on_cpu(x.sharding)
    replicated = _placed(x, sharding=NamedSharding(x.sharding.mesh, PartitionSpec()))
    _wait_on_cpu(x.sharding)
    return replicated.addressable_data(0)


def _wait_on_cpu(sharding: Sharding) -> None:
    """Wait for every program that may communicate.

    The CPU runs independent programs at the same time, in any order, and gloo takes the first
    message for the one it expects: two processes then end with "Is there a distributed collective
    mismatch in your code?" (jax 0.10.2). An accelerator runs its programs in the order of their
    dispatch.
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
    """The processes that share an array.

    All of them must call every method, in the same order; it returns once all have called.

    Attributes:
        devices: One device of each process, in the order of the processes.
    """

    devices: tuple[Any, ...]

    @classmethod
    def of(cls, sharding: Sharding | None) -> "ProcessGroup | None":
        """The processes of a sharding; ``None`` if all of its devices are of this process."""
        if sharding is None or sharding.is_fully_addressable:
            return None
        first: dict[int, Any] = {}
        for device in sorted(sharding.device_set, key=lambda d: d.id):
            first.setdefault(device.process_index, device)
        return cls(tuple(first[process] for process in sorted(first)))

    @classmethod
    def everywhere(cls) -> "ProcessGroup | None":
        """All processes, or ``None`` if there is only one."""
        mesh = Mesh(np.array(jax.devices()), ("device",))
        return cls.of(NamedSharding(mesh, PartitionSpec()))

    @property
    def rank(self) -> int:
        """Index of this process among them."""
        return [device.process_index for device in self.devices].index(jax.process_index())

    def gathered(self, x: np.ndarray) -> np.ndarray:
        """Gather ``x`` from all processes as ``(processes, ...)``; shape and dtype must agree."""
        return self._collected(x, add=False)

    def combined(self, x: np.ndarray) -> np.ndarray:
        """Sum arrays of which every element is nonzero in at most one process.

        The sum is over the bits as integers, so values arrive exactly.
        """
        bits = np.ascontiguousarray(x).reshape(-1).view(np.uint32)
        return self._collected(bits, add=True).view(x.dtype).reshape(x.shape)

    def told(self, text: str) -> list[str]:
        """Gather a text from each process, cut to 512 bytes."""
        sent = np.frombuffer(text.encode()[:_TEXT].ljust(_TEXT, b"\0"), np.uint8)
        return [row.tobytes().rstrip(b"\0").decode(errors="ignore") for row in self.gathered(sent)]

    def agree(self, doing: str, about: str, error: BaseException | None = None) -> None:
        """Continue together, or fail together.

        Args:
            doing: Description of the step, for errors.
            about: Text that must be equal in every process.
            error: Error of this process.

        Raises:
            ProcessesDisagreeError: another process failed, or has another ``about``.
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
        with jax.set_mesh(mesh):  # the caller may have set another mesh
            all_rows = jax.make_array_from_single_device_arrays(shape, rows, [mine])
            return np.asarray(_replicated(all_rows, mesh=mesh, add=add))


@functools.partial(jax.jit, static_argnames=("mesh", "add"))
def _replicated(rows: Array, *, mesh: Mesh, add: bool) -> Array:
    x = rows.sum(0, dtype=rows.dtype) if add else rows
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec()))


def in_equal_shares(costs: list[int], count: int) -> list[int]:
    """Assign pieces of work to ``count`` workers: the costliest first, to the least busy.

    No worker gets more than its equal share of the sum plus the largest piece.

    Args:
        costs: Cost of each piece of work.
        count: Number of workers.

    Example:
        >>> in_equal_shares([1, 8, 1, 5, 2], 2)
        [1, 0, 0, 1, 1]
    """
    owners, loads = [0] * len(costs), [0] * count
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += costs[i]
    return owners


# ---------------- a check that all processes feed the right batch


def check_same_batch(batch: PyTree, *, local: bool = False) -> None:
    """Check that the processes of a run feed the same batch. Call it once, with the first batch.

    JAX does not notice a difference: each process continues with its own rows, and parameters that
    should be equal diverge. Every process must call it. In a single process it does nothing.

    Args:
        batch: A tree of arrays, equal in every process, as for ``jax.device_put(batch, sharding)``.
        local: Whether each process holds its own rows instead, as for
            ``jax.make_array_from_process_local_data``. Then only structure, shapes and dtypes are
            compared.

    Raises:
        ProcessesDisagreeError: structure, shapes, dtypes or a digest of the values differ, or
            another process has failed.
        ValueError: an array is already sharded over several processes, so it cannot be read here.

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
