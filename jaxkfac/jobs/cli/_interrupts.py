"""Ctrl-C, SIGTERM and SIGHUP: how a command is stopped, and when stopping would do harm."""

import contextlib
import shlex
import signal
import sys
import threading
from collections.abc import Iterator


class Stopped(KeyboardInterrupt):
    """A signal that stops a command as Ctrl-C does.

    Attributes:
        number: Of the signal.
    """

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__()
        self.number = number


@contextlib.contextmanager
def stopping_signals() -> Iterator[None]:
    """A block in which SIGTERM and SIGHUP do what Ctrl-C does, as schedulers and terminals send.

    A signal that was ignored before (SIGHUP under ``nohup``) stays ignored. Only the main thread
    can have handlers; elsewhere nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}
    before = {n: handler for n, handler in before.items() if handler == signal.SIG_DFL}
    for number in before:
        signal.signal(number, _as_interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_NAMES = ("SIGTERM", "SIGHUP")  # Windows has no SIGHUP


def _as_interrupt(number: int, frame: object) -> None:
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, Hold):
        handler(number, frame)
    else:
        raise Stopped(number)


def signal_of(error: BaseException | None) -> int:
    """The signal that an interrupt, or what it was raised from, came by; Ctrl-C otherwise."""
    while error is not None:
        if isinstance(error, Stopped):
            return error.number
        error = error.__cause__ or error.__context__
    return signal.SIGINT


@contextlib.contextmanager
def interrupts_deferred(doing: str) -> Iterator["Hold"]:
    """Hold a first Ctrl-C, SIGTERM or SIGHUP back until the block is left; a second acts at once.

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
    except KeyboardInterrupt as error:  # of a block that looked at what it was told
        if hold.pressed and signal_of(error) == signal.SIGINT:
            raise Stopped(hold.number) from error
        raise
    finally:
        signal.signal(signal.SIGINT, before)
    if hold.pressed:
        raise Stopped(hold.number)


class Hold:
    """A handler that remembers the first signal to stop.

    Attributes:
        number: Of the signal; 0 as long as none has come.
    """

    def __init__(self, doing: str) -> None:
        self._doing, self.number = doing, 0

    @property
    def pressed(self) -> bool:
        """Whether one has come."""
        return self.number != 0

    def __call__(self, number: int, *_: object) -> None:
        if self.number:
            raise Stopped(number)
        self.number = number
        again = "Ctrl-C again" if number == signal.SIGINT else "a second signal"
        come = "" if number == signal.SIGINT else f"{signal.Signals(number).name}: "
        words = f"\n{come}{self._doing}, then stopping; {again} stops now"
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
    """Say on standard error how to go on after a Ctrl-C, or another signal."""
    number = signal_of(error)
    stopped = "interrupted"
    if number != signal.SIGINT:
        stopped = f"stopped by {signal.Signals(number).name}"
    words = f"{stopped}; continue with: {resume_command(argv)}"
    if isinstance(error, NothingBegunInterrupt):
        words = f"{stopped} before it began; start with: {shlex.join(['jaxkfac', *argv])}"
    print(f"\n{words}", file=sys.stderr)
