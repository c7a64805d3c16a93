"""Where a run's numbers go while it runs."""

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

from jaxkfac.jobs.cli.finetune._options import LogTo

_INSTALL = {
    "tensorboardX": 'pip install "jaxkfac[finetune]"',
    "wandb": "pip install wandb",
    "trackio": "pip install trackio",
}


@runtime_checkable
class MetricLogger(Protocol):
    """Takes numbers and texts of an update."""

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers by name."""
        ...

    def text(self, step: int, name: str, words: str) -> None:
        """Words by name, such as a sample."""
        ...

    def close(self) -> None:
        """Write what is held back."""
        ...


class TensorBoard:
    """An event file in a folder, written by this thread.

    ``SummaryWriter`` has a thread that ends when the disk is full, and whoever writes then waits
    for it forever.
    """

    def __init__(self, folder: Path, step: int) -> None:
        package = _package("tensorboardX")
        proto, self._summary = package.proto.event_pb2, package.summary
        self._folder, self._event, self._failed = folder, proto.Event, False
        with self._explained():
            folder.mkdir(parents=True, exist_ok=True)
            self._writer = package.event_file_writer.EventsWriter(str(folder / "events"))
            if step:  # what an interrupted run wrote after its checkpoint is hidden
                start = proto.SessionLog(status=proto.SessionLog.START)
                self._writer.write_event(self._event(step=step, session_log=start))

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        self._add(step, [self._summary.scalar(name, value) for name, value in values.items()])

    def text(self, step: int, name: str, words: str) -> None:
        self._add(step, [self._summary.text(name, words)])

    def close(self) -> None:
        if not self._failed:  # its error has been raised
            with self._explained():
                self._writer.close()

    def _add(self, step: int, summaries: Sequence[Any]) -> None:
        with self._explained():
            for summary in summaries:
                event = self._event(wall_time=time.time(), step=step, summary=summary)
                self._writer.write_event(event)
            self._writer.flush()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._failed = True
            reason = os.strerror(error.errno or 0)
            raise OSError(
                error.errno,
                f"numbers for TensorBoard could not be saved to {self._folder} ({reason}); "
                "checkpoints are as they were: make room and continue with --resume",
            ) from error


class Tracker:
    """Weights & Biases, or trackio, which has the same face.

    A service refuses steps that go back, and both number their calls themselves: the update is
    one of the numbers.
    """

    def __init__(self, package: str, name: str, config: Mapping[str, Any]) -> None:
        self._package = _package(package)
        self._package.init(project="jaxkfac", name=name, config=dict(config))

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        self._package.log({"update": step, **values})

    def text(self, step: int, name: str, words: str) -> None:
        self._package.log({"update": step, name: words})

    def close(self) -> None:
        self._package.finish()


class Several:
    """All of them at once; none of them, too."""

    def __init__(self, loggers: Sequence[MetricLogger]) -> None:
        self._loggers = tuple(loggers)

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        for logger in self._loggers:
            logger.numbers(step, values)

    def text(self, step: int, name: str, words: str) -> None:
        for logger in self._loggers:
            logger.text(step, name, words)

    def close(self) -> None:
        for logger in self._loggers:
            logger.close()


def check_loggers(names: Sequence[LogTo]) -> None:
    """Refuse what is not installed, before anything is computed.

    Raises:
        ModuleNotFoundError: a package is missing; how to install it is said.
    """
    for name in names:
        _package("tensorboardX" if name == "tensorboard" else name)


def open_loggers(
    names: Sequence[LogTo], output: Path, *, config: Mapping[str, Any], step: int
) -> Several:
    """The loggers that were asked for.

    Args:
        names: Of the loggers.
        output: Of the run: TensorBoard's files go to ``tensorboard`` in it.
        config: What the run was asked to do.
        step: Update at which it begins.
    """
    return Several(
        [
            TensorBoard(output / "tensorboard", step)
            if name == "tensorboard"
            else Tracker(name, output.name, config)
            for name in names
        ]
    )


def _package(name: str) -> ModuleType:
    import importlib

    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{name} is not installed: {_INSTALL[name]}, or leave it out of --log", name=error.name
        ) from None
