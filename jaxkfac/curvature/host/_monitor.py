"""One condition for every wait, which ends by success, a failure elsewhere, close, or time."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator


class Monitor:
    """What the threads of a service tell one another: progress, the first error, the end.

    Args:
        timeout: Seconds after which a wait gives up.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._condition = threading.Condition()
        self._error: BaseException | None = None
        self._closed = False
        self._untold = False
        self._on_stop: list[Callable[[], None]] = []

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Change shared state, then wake whoever waits for it."""
        with self._condition:
            yield
            self._condition.notify_all()

    @property
    def stopped(self) -> bool:
        """Whether work is over, by failure or by close."""
        return self._closed or self._error is not None

    def on_stop(self, call: Callable[[], None]) -> None:
        """Have ``call`` called once work is over."""
        self._on_stop.append(call)

    def fail(self, error: BaseException) -> None:
        """Stop all work because of ``error``; the first one is kept for the caller."""
        with self.changing():
            if self.stopped:
                return
            self._error, self._untold = error, True
        self._stop()

    def close(self) -> None:
        """Stop all work."""
        with self.changing():
            self._closed = True
        self._stop()

    def _stop(self) -> None:
        for call in self._on_stop:
            call()

    def check(self, doing: str) -> None:
        """Raise what another thread failed with, or that the service is closed."""
        if self._error is not None:
            self._untold = False
            raise self._error
        if self._closed:
            raise RuntimeError(f"{doing}: this HostCurvature is closed; make a new one")

    def untold(self) -> BaseException | None:
        """The error that no caller has seen yet, given out once."""
        error, self._untold = (self._error if self._untold else None), False
        return error

    def wait_for(self, ready: Callable[[], bool], what: str) -> None:
        """Wait until ``ready()``.

        Raises:
            TimeoutError: it took longer than the time limit.
            RuntimeError: the service was closed meanwhile.
            BaseException: whatever another thread failed with.
        """
        deadline = time.monotonic() + self.timeout
        with self._condition:
            while True:
                self.check(f"waiting for {what}")
                if ready():
                    return
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(
                        f"waited {self.timeout:g} s for {what}; if that is only slow, pass a "
                        "larger timeout= to HostCurvature"
                    )
                self._condition.wait(left)
