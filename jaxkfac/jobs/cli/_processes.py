"""`--coordinator`: one run in several processes, which continue, stop and fail together."""

import dataclasses
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from jaxkfac import __version__
from jaxkfac._arguments import ArrayTree
from jaxkfac._errors import JaxkfacError
from jaxkfac.jobs.cli._interrupts import Hold, Stopped, interrupts_deferred, nothing_begun
from jaxkfac.memory import ProcessGroup, initialize_distributed, is_out_of_memory, note_on_cpus


class LostProcessError(JaxkfacError, RuntimeError):
    """A program lost its connection to another process, which has most likely ended."""


class RunProcesses:
    """The processes of a run; with a single process every method is trivial.

    All processes must call every method, in the same order.

    Args:
        group: The group of all processes, or ``None`` for a single process.

    Attributes:
        stop_together: Whether Ctrl-C has stopped all processes at the same point, so that they may
            still communicate.
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        self._group = group
        self._hold: Hold | None = None
        self.stop_together = group is None

    @property
    def several(self) -> bool:
        """Whether there is more than one process."""
        return self._group is not None

    @property
    def first(self) -> bool:
        """Whether this process writes files and prints."""
        return self._group is None or self._group.rank == 0

    @contextmanager
    def together(self, doing: str) -> Iterator[list[Any]]:
        """A block that succeeds in all processes, or fails in all of them.

        Args:
            doing: Description of the block, for errors.

        Yields:
            A list. Put values into it; all processes must put in values of equal ``repr``.

        Raises:
            ProcessesDisagreeError: the values differ, or another process failed; quotes its error.
        """
        shared_values: list[Any] = []
        if self._group is None:
            yield shared_values
            return
        try:
            yield shared_values
        except Exception as error:
            self._group.agree(doing, "", error)
        else:
            self._group.agree(doing, repr(shared_values))

    def compiled(self, lowered: jax.stages.Lowered) -> Any:
        """Compile a program if it is the same in every process.

        Different programs would wait for one another for ever.

        Raises:
            ProcessesDisagreeError: another process has a different program.
        """
        with self.together("compiling") as shared_values:
            if self._group is not None:
                shared_values.append(zlib.crc32(lowered.as_text().encode()))
        return lowered.compile()

    @contextmanager
    def stopping_together(self) -> Iterator[None]:
        """A training block in which a signal in one process stops all at the next pause."""
        if self._group is None:
            yield
            return
        with interrupts_deferred("waiting for the other processes") as hold:
            self._hold = hold
            yield

    def pause(self, step: int, error: Exception | None = None) -> None:
        """Continue with an update, or stop, in all processes.

        Args:
            step: Number of the update.
            error: An error of this process alone.

        Raises:
            ProcessesDisagreeError: another process has failed, or is at another update.
            Stopped: one process received Ctrl-C, SIGTERM or SIGHUP.
            Exception: ``error``.
        """
        if self._group is None:
            if error is not None:
                raise error
            return
        self._group.agree(f"update {step}", str(step), error)
        came = 0 if self._hold is None else self._hold.number
        if number := int(self._group.gathered(np.array([came], np.uint8)).max()):
            self.stop_together = True
            raise Stopped(number)

    def slowest(self, seconds: float) -> float:
        """The largest ``seconds`` of all processes."""
        if self._group is None:
            return seconds
        return float(self._group.gathered(np.array([seconds], np.float32)).max())

    def settled(self, tree: ArrayTree) -> Any:
        """Wait for ``tree`` where two programs must not run at the same time.

        On CPUs, independent programs run in any order, and gloo takes the first message that
        arrives for the one it expects.
        """
        if self._group is None or self._group.devices[0].platform != "cpu":
            return tree
        return jax.block_until_ready(tree)


ALONE = RunProcesses(None)


@contextmanager
def run_processes(arguments: Any) -> Iterator[RunProcesses]:
    """Join the other processes of a run, before JAX looks for its devices.

    Args:
        arguments: Arguments of ``train`` or ``finetune``. The options ``process``, ``debug`` and
            ``json`` may differ between processes.

    Raises:
        ValueError: the options about processes do not go together, or ``auto`` finds no cluster.
        ProcessesDisagreeError: another process has other options, or another version.
        LostProcessError: a program failed while it communicated.
    """
    address = arguments.coordinator
    check_processes(address, arguments.processes, arguments.process)
    if address is None:
        yield ALONE
        return
    with nothing_begun():
        _join(address, arguments.processes, arguments.process)
        processes = RunProcesses(ProcessGroup.everywhere())
    if processes.first and (note := note_on_cpus(jax.devices()[0].platform)):
        print(f"note: {note}", file=sys.stderr)
    try:
        with nothing_begun(), processes.together("comparing options") as shared_values:
            shared_values += [
                type(arguments).__name__,
                __version__,
                jax.__version__,
                _shared(arguments),
            ]
        yield processes
        with processes.together("ending"):
            pass
    except jax.errors.JaxRuntimeError as error:
        if is_out_of_memory(error):
            raise
        reason = str(error).partition("\n")[0]
        raise LostProcessError(
            f"process {jax.process_index()} could not exchange with the others ({reason}); if "
            "one of them has ended, it says why: start all of them again with --resume"
        ) from error


def _join(address: str, count: int | None, number: int | None) -> None:
    options: dict[str, Any] = {}
    if address != "auto":
        options = {
            "coordinator_address": address,
            "num_processes": count,
            "process_id": number,
            "cluster_detection_method": "deactivate",
        }
    try:
        initialize_distributed(**options)
    except ValueError as error:
        if options:
            raise
        raise ValueError(
            f"--coordinator auto: jax.distributed knows no cluster here ({error}): start the "
            f"command with srun, with Open MPI's mpirun or on each host of a TPU pod, or give "
            "--coordinator HOST:PORT, --processes and --process"
        ) from error


def _shared(arguments: Any) -> dict[str, Any]:
    """The options that must be equal in every process."""
    per_process = ("coordinator", "process", "json", "debug")
    return {name: x for name, x in dataclasses.asdict(arguments).items() if name not in per_process}


def check_processes(address: str | None, count: int | None, number: int | None) -> None:
    """Refuse options about processes that do not go together.

    Raises:
        ValueError: names the option.
    """
    if address in (None, "auto"):
        given_options = [
            f"--{n}" for n, x in (("processes", count), ("process", number)) if x is not None
        ]
        if given_options:
            raise ValueError(
                f"{given_options[0]} needs --coordinator HOST:PORT, the address of process 0"
            )
        return
    if count is None or number is None:
        raise ValueError(
            f"--coordinator {address} needs --processes, how many there are, and --process, "
            "which of them this is"
        )
    if not 0 <= number < count:
        raise ValueError(f"--process must lie in 0 .. {count - 1}, not {number}")
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal()):
        raise ValueError(f"--coordinator must be HOST:PORT or auto, not {address!r}")
