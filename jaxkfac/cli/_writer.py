"""Checkpoints written while training goes on."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxkfac.cli._checkpoint import Checkpoint, save_checkpoint
from jaxkfac.cli._interrupts import interrupts_deferred


class CheckpointWriter:
    """Writes one checkpoint after the other, in a thread of its own.

    A checkpoint holds copies, so that the state may be donated meanwhile. The next one waits for
    the one before: no more than one is in main memory. A file is still written whole or not at
    all, whatever ends the process.

    Attributes:
        error: Why a checkpoint could not be written, or ``None``; after it nothing is written.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None
        self._thread: threading.Thread | None = None

    def save(self, folder: Path, checkpoint: Checkpoint) -> None:
        """Begin to write ``folder/step``, as :func:`save_checkpoint` does."""
        self.wait()
        if self.error is not None:
            return

        def write() -> None:
            try:
                save_checkpoint(folder, checkpoint)
            except Exception as error:  # raised by the thread that trains
                self.error = error

        # A second Ctrl-C ends the process, which does not wait for a daemon.
        self._thread = threading.Thread(target=write, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until the last checkpoint is on the disk, or has failed; a first Ctrl-C waits too."""
        if self._thread is not None:
            with interrupts_deferred("writing the checkpoint"):
                self._thread.join()
            self._thread = None


@contextmanager
def checkpoint_writer() -> Iterator[CheckpointWriter]:
    """A writer whose last checkpoint is on the disk when the block is left, by an error too.

    Raises:
        OSError: a checkpoint could not be written.
    """
    writer = CheckpointWriter()
    try:
        yield writer
    except BaseException:  # which says more than what the disk then says
        writer.wait()
        raise
    writer.wait()
    if writer.error is not None:
        raise writer.error
