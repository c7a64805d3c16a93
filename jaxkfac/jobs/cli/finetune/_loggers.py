"""Loggers that receive a run's numbers while it trains."""

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
    """Receives numbers and texts of an update."""

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers by name."""
        ...

    def text(self, step: int, name: str, words: str) -> None:
        """A text by name, such as a sample."""
        ...

    def close(self) -> None:
        """Write what is buffered."""
        ...


class TensorBoard:
    """Writes an event file to a folder, in the calling thread.

    ``SummaryWriter`` is not used: its thread dies when the disk is full, and the next write then
    blocks for ever.
    """

    def __init__(self, folder: Path, step: int) -> None:
        package = _package("tensorboardX")
        proto, self._summary = package.proto.event_pb2, package.summary
        self._folder, self._event, self._failed = folder, proto.Event, False
        with self._explained():
            folder.mkdir(parents=True, exist_ok=True)
            self._writer = package.event_file_writer.EventsWriter(str(folder / "events"))
            if step:  # hides what an interrupted run wrote after its checkpoint
                start = proto.SessionLog(status=proto.SessionLog.START)
                self._writer.write_event(self._event(step=step, session_log=start))

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        self._add(step, [self._summary.scalar(name, value) for name, value in values.items()])

    def text(self, step: int, name: str, words: str) -> None:
        self._add(step, [self._summary.text(name, words)])

    def close(self) -> None:
        if not self._failed:  # otherwise its error has been raised already
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
    """Logs to Weights & Biases, or to trackio, which has the same interface.

    Both number their calls themselves and reject steps that go back, so the update is logged as one
    of the numbers.
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
    """Forwards to any number of loggers, including none."""

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
    """Check that the loggers' packages are installed, before anything is computed.

    Raises:
        ModuleNotFoundError: a package is missing; says how to install it.
    """
    for name in names:
        _package("tensorboardX" if name == "tensorboard" else name)


def open_loggers(
    names: Sequence[LogTo], output: Path, *, config: Mapping[str, Any], step: int
) -> Several:
    """Open the chosen loggers.

    Args:
        names: Names of the loggers.
        output: Output folder of the run; TensorBoard's files go to ``tensorboard`` in it.
        config: Options of the run.
        step: Update at which the run begins.
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
