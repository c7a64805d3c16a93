"""How many bytes of factors are between the device and the average."""

import contextlib
import threading
from collections.abc import Iterator

from jaxkfac.curvature.host._monitor import Monitor


class InFlight:
    """A semaphore of bytes: taken before a copy is dispatched, given back when it has landed.

    What is larger than the limit goes alone. Bytes that a thread has taken ahead with
    :meth:`room` are used up first by what that thread takes.

    Args:
        limit: Bytes.
        monitor: Whose time limit and errors end a wait.
    """

    def __init__(self, limit: int, monitor: Monitor) -> None:
        self.limit, self._monitor = limit, monitor
        self.taken = 0
        self.most = 0
        self._ahead = threading.local()

    def take(self, nbytes: int, what: str) -> None:
        """Wait until ``nbytes`` fit beside what is taken, and take them."""
        ahead = getattr(self._ahead, "left", 0)
        used = min(ahead, nbytes)
        self._ahead.left = ahead - used
        if used < nbytes:
            self._take(nbytes - used, what)

    def _take(self, nbytes: int, what: str) -> None:
        def fits() -> bool:
            return self.taken == 0 or self.taken + nbytes <= self.limit

        message = f"room for {what}: {nbytes} bytes beside those in flight, limit {self.limit}"
        with self._monitor.changing():
            self._monitor.wait_for(fits, message)
            self.taken += nbytes
            self.most = max(self.most, self.taken)

    def give_back(self, nbytes: int) -> None:
        """End the flight of ``nbytes``."""
        with self._monitor.changing():
            self.taken -= nbytes

    @contextlib.contextmanager
    def room(self, nbytes: int) -> Iterator[None]:
        """Take ``nbytes`` for what this thread takes in the block; the rest is given back."""
        self._take(nbytes, "factors about to be dispatched")
        before = getattr(self._ahead, "left", 0)
        self._ahead.left = before + nbytes
        try:
            yield
        finally:
            rest = max(self._ahead.left - before, 0)
            self._ahead.left -= rest
            self.give_back(rest)
