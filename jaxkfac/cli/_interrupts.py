"""Ctrl-C at a moment when stopping does harm."""

import contextlib
import shlex
import signal
import sys
import threading
from collections.abc import Iterator

from jaxkfac.cli._phases import phase


@contextlib.contextmanager
def interrupts_deferred(doing: str) -> Iterator[None]:
    """Hold a first Ctrl-C back until the block is left; a second one acts at once.

    Args:
        doing: What is waited for, said on standard error when the first one arrives; also the
            phase of the run, for an error that is explained.
    """
    if threading.current_thread() is not threading.main_thread():
        with phase(doing):
            yield
        return
    pressed = []

    def hold(*_: object) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(True)
        print(f"\n{doing}, then stopping; Ctrl-C again stops now", file=sys.stderr, flush=True)

    before = signal.signal(signal.SIGINT, hold)
    try:
        with phase(doing):
            yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


def resume_command(argv: list[str]) -> str:
    """The command that continues a run that was started with ``argv``."""
    kept = [word for word in argv if word not in ("--overwrite", "--resume")]
    return shlex.join(["jaxkfac", *kept, "--resume"])


def say_interrupted(argv: list[str]) -> None:
    """Say on standard error how to go on after a Ctrl-C."""
    print(f"\ninterrupted; continue with: {resume_command(argv)}", file=sys.stderr)
