"""Ctrl-C, SIGTERM and SIGHUP: stopping a command without harm to its files."""

import contextlib
import shlex
import signal
import sys
import threading
from collections.abc import Iterator


class Stopped(KeyboardInterrupt):
    """A signal that stops a command like Ctrl-C.

    Attributes:
        number: Number of the signal.
    """

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__()
        self.number = number


@contextlib.contextmanager
def stopping_signals() -> Iterator[None]:
    """A block in which SIGTERM and SIGHUP, sent by schedulers and terminals, act like Ctrl-C.

    A signal that was ignored before stays ignored (SIGHUP under ``nohup``). Only the main thread
    can set handlers; in other threads nothing changes.
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
    """The signal of an interrupt or of its cause; SIGINT for a plain Ctrl-C."""
    while error is not None:
        if isinstance(error, Stopped):
            return error.number
        error = error.__cause__ or error.__context__
    return signal.SIGINT


@contextlib.contextmanager
def interrupts_deferred(doing: str) -> Iterator["Hold"]:
    """Defer a first Ctrl-C, SIGTERM or SIGHUP to the end of the block; a second acts at once.

    In nested blocks the outer one defers it, to its own end. The block can ask the yielded
    ``Hold`` whether a signal has come.

    Args:
        doing: What the user waits for; printed on standard error when the first signal arrives.
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
    except KeyboardInterrupt as error:  # raised by a block that saw the signal
        if hold.pressed and signal_of(error) == signal.SIGINT:
            raise Stopped(hold.number) from error
        raise
    finally:
        signal.signal(signal.SIGINT, before)
    if hold.pressed:
        raise Stopped(hold.number)


class Hold:
    """A handler that remembers the first stopping signal.

    Attributes:
        number: Number of the signal; 0 before one has come.
    """

    def __init__(self, doing: str) -> None:
        self._doing, self.number = doing, 0

    @property
    def pressed(self) -> bool:
        """Whether a signal has come."""
        return self.number != 0

    def __call__(self, number: int, *_: object) -> None:
        if self.number:
            raise Stopped(number)
        self.number = number
        again = "Ctrl-C again" if number == signal.SIGINT else "a second signal"
        come = "" if number == signal.SIGINT else f"{signal.Signals(number).name}: "
        message = f"\n{come}{self._doing}, then stopping; {again} stops now"
        print(message, file=sys.stderr, flush=True)


class NothingBegunInterrupt(KeyboardInterrupt):
    """A Ctrl-C before a command has changed its output folder."""


@contextlib.contextmanager
def nothing_begun() -> Iterator[None]:
    """A block that leaves the output folder unchanged: after a Ctrl-C nothing can be resumed."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise NothingBegunInterrupt from error


def resume_command(argv: list[str]) -> str:
    """The command that resumes a run started with ``argv``."""
    kept_words = [word for word in argv if word not in ("--overwrite", "--resume")]
    return shlex.join(["jaxkfac", *kept_words, "--resume"])


def say_interrupted(argv: list[str], error: KeyboardInterrupt) -> None:
    """Print on standard error how to continue after Ctrl-C or another signal."""
    number = signal_of(error)
    stopped = "interrupted"
    if number != signal.SIGINT:
        stopped = f"stopped by {signal.Signals(number).name}"
    message = f"{stopped}; continue with: {resume_command(argv)}"
    if isinstance(error, NothingBegunInterrupt):
        message = f"{stopped} before it began; start with: {shlex.join(['jaxkfac', *argv])}"
    print(f"\n{message}", file=sys.stderr)
