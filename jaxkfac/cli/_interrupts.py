"""Ctrl-C at a moment when stopping does harm."""

import contextlib
import shlex
import signal
import sys
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def interrupts_deferred(doing: str) -> Iterator["Hold"]:
    """Hold a first Ctrl-C back until the block is left; a second one acts at once.

    Inside another such block the outer one holds it back, to its own end. The block is told
    whether one has come.

    Args:
        doing: What is waited for, said on standard error when the first one arrives.
    """
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT)
    if not in_main or isinstance(before, Hold):
        yield before if isinstance(before, Hold) else Hold(doing)
        return
    hold = Hold(doing)
    signal.signal(signal.SIGINT, hold)
    try:
        yield hold
    finally:
        signal.signal(signal.SIGINT, before)
    if hold.pressed:
        raise KeyboardInterrupt


class Hold:
    """A handler that remembers the first Ctrl-C.

    Attributes:
        pressed: Whether it has come.
    """

    def __init__(self, doing: str) -> None:
        self._doing, self.pressed = doing, False

    def __call__(self, *_: object) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True
        words = f"\n{self._doing}, then stopping; Ctrl-C again stops now"
        print(words, file=sys.stderr, flush=True)


class NothingBegunInterrupt(KeyboardInterrupt):
    """A Ctrl-C before a command has begun with what it is asked for."""


@contextlib.contextmanager
def nothing_begun() -> Iterator[None]:
    """A block in which the output folder stays as it was: a Ctrl-C leaves nothing to resume."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise NothingBegunInterrupt from error


def resume_command(argv: list[str]) -> str:
    """The command that continues a run that was started with ``argv``."""
    kept = [word for word in argv if word not in ("--overwrite", "--resume")]
    return shlex.join(["jaxkfac", *kept, "--resume"])


def say_interrupted(argv: list[str], error: KeyboardInterrupt) -> None:
    """Say on standard error how to go on after a Ctrl-C."""
    words = f"interrupted; continue with: {resume_command(argv)}"
    if isinstance(error, NothingBegunInterrupt):
        words = f"interrupted before it began; start with: {shlex.join(['jaxkfac', *argv])}"
    print(f"\n{words}", file=sys.stderr)
