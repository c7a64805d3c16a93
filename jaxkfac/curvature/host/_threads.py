"""Threads and what they wait for: one condition for a service, and queues of jobs."""

import atexit
import contextlib
import dataclasses
import functools
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping


@dataclasses.dataclass(eq=False)
class Job:
    """A call to be made once, however often it is queued.

    A caller that was interrupted cannot know whether its job is queued; it queues it again.

    Attributes:
        call: What to do; ``None`` once it has been done.
    """

    call: Callable[[], None] | None


class Monitor:
    """What the threads of a service tell one another: progress, the first error, the end.

    Every wait ends by success, a failure elsewhere, close, or time.

    Args:
        timeout: Seconds after which a wait gives up.

    Attributes:
        stopped: Whether work is over, by failure or by close.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.stopped = False
        self._process = os.getpid()
        self._condition = threading.Condition()
        self._error: BaseException | None = None
        self._untold = False
        self._on_stop: list[Callable[[], None]] = []

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Change shared state, then wake whoever waits for it."""
        with self._condition:
            yield
            self._condition.notify_all()

    def on_stop(self, call: Callable[[], None]) -> None:
        """Have ``call`` called once work is over."""
        self._on_stop.append(call)

    def fail(self, error: BaseException) -> None:
        """Stop all work because of ``error``; the first one is kept for the caller."""
        with self.changing():
            if self.stopped:
                return
            self._error, self._untold, self.stopped = error, True, True
        self._stop()

    def close(self) -> None:
        """Stop all work; in a forked process there is none."""
        if self._process != os.getpid():
            return  # a thread may have held the condition when the process was forked
        with self.changing():
            self.stopped = True
        self._stop()

    def _stop(self) -> None:
        for call in self._on_stop:
            call()

    def check_process(self, doing: str) -> None:
        """Refuse a forked process, in which there are no threads; it takes no lock."""
        if self._process != os.getpid():
            raise RuntimeError(
                f"{doing}: this HostCurvature was made in process {self._process}, and its threads "
                f"are not in process {os.getpid()}, which was forked from it; call it in the "
                "process that made it, or make one after the fork"
            )

    def check(self, doing: str) -> None:
        """Raise what another thread failed with, or that the service is closed."""
        if self._error is not None:
            self._untold = False
            raise self._error
        if self.stopped:
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


class _Ahead(threading.local):
    """Keys of the bytes that a thread has taken before it queues the jobs that hold them."""

    keys: tuple[object, ...] = ()


class Workers:
    """A first-in, first-out queue of jobs and its threads; with one thread they run in order.

    Jobs may hold bytes, taken under keys before a job is queued and given back when it has been
    done and let go of. What is larger than the limit goes alone. An exception that interrupts a
    call at any point leaves nothing half done: bytes are taken or not, and a job that is queued
    twice is done once.

    An exception in a job, of whatever kind, stops all workers of the monitor and reaches the
    caller at the next call.

    The threads are daemons, and an interpreter that ends stops them first: it waits for the jobs
    that are being done, because one that computes in XLA while the interpreter is taken apart
    ends the process by ``std::terminate``. Only what takes longer than the time limit is left
    to itself.

    Args:
        name: Of the threads.
        threads: How many.
        monitor: Shared by all workers of a service.
        limit: Bytes that jobs may hold together.

    Attributes:
        most: The most bytes that were ever taken.
    """

    def __init__(self, name: str, threads: int, monitor: Monitor, limit: int = 0) -> None:
        self.most = 0
        self._held: dict[object, int] = {}
        self._queued: set[Job] = set()
        self._limit, self._monitor, self._ahead = limit, monitor, _Ahead()
        # Simple: its ``put`` is safe in a finalizer, which may interrupt another ``put``.
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True)
            for i in range(threads)
        ]
        monitor.on_stop(self._wake)
        for thread in self._threads:
            _stop_at_exit(thread, monitor)
            thread.start()

    @property
    def taken(self) -> int:
        """Bytes that are taken."""
        return sum(self._held.values())

    @property
    def idle(self) -> bool:
        """Whether every job has been done; ask under the monitor's condition."""
        return all(job.call is None for job in self._queued)

    def take(self, sizes: Mapping[object, int], what: str) -> None:
        """Wait until bytes fit beside what is taken, and take them, each size under its key.

        What this thread has taken ahead with :meth:`room` is used up first.
        """
        with self._monitor.changing():
            wanted, after = sum(sizes.values()), dict(sizes)
            for key in reversed(self._ahead.keys):
                used = min(self._held[key], wanted)
                after[key] = self._held[key] - used
                wanted -= used

            def fits() -> bool:
                return self.taken == 0 or self.taken + wanted <= self._limit

            if wanted:
                message = f"room for {what}: {wanted} bytes beside those in flight"
                self._monitor.wait_for(fits, f"{message}, limit {self._limit}")
            self._held.update(after)  # in one step, so that no interrupt takes a part of it
            self.most = max(self.most, self.taken)

    def give_back(self, key: object) -> None:
        """Give back what was taken under ``key``, if it was."""
        with self._monitor.changing():
            self._held.pop(key, None)

    @contextlib.contextmanager
    def room(self, nbytes: int) -> Iterator[None]:
        """Take ``nbytes`` for what this thread takes in the block; the rest is given back."""
        outer, key = self._ahead.keys, object()
        try:
            self._ahead.keys = ()
            self.take({key: nbytes}, "factors about to be dispatched")
            self._ahead.keys = (*outer, key)
            yield
        finally:
            self._ahead.keys = outer
            self.give_back(key)

    def put(self, job: Job) -> None:
        """Queue a job; one that has been queued before is done once all the same."""
        self._jobs.put(job)
        with self._monitor.changing():
            if job.call is not None:
                self._queued.add(job)

    def join(self, deadline: float) -> list[str]:
        """Wait until ``deadline`` (``time.monotonic``); the names of threads that still run."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(deadline - time.monotonic(), 0))
        return [thread.name for thread in self._threads if thread.is_alive()]

    def _wake(self) -> None:
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) and not self._monitor.stopped:
            try:
                if job.call is not None:
                    job.call()
            except BaseException as error:
                self._monitor.fail(error)
            with self._monitor.changing():
                job.call = None  # it holds arrays, and whoever waits may count on the memory
                self._queued.discard(job)
            del job
        try:
            while True:
                self._jobs.get_nowait()  # jobs that will not be done hold arrays too
        except queue.Empty:
            self._wake()  # the next thread ends as well


def call_in_time(call: Callable[[], None], timeout: float, what: str) -> None:
    """Call what may wait for other processes; its thread is left behind when it takes too long.

    Raises:
        TimeoutError: it took longer than ``timeout`` seconds.
        BaseException: whatever it raised.
    """
    errors: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)
        done.set()

    threading.Thread(target=run, name="jaxkfac-exchange", daemon=True).start()
    if not done.wait(timeout):
        raise TimeoutError(
            f"waited {timeout:g} s for {what}: one of them has ended, or does something else; if "
            "they are only slow, pass a larger timeout= to HostCurvature"
        )
    if errors:
        raise errors[0]


def _stop_at_exit(thread: threading.Thread, monitor: Monitor) -> None:
    """Registered later than JAX's own, so called earlier; until the thread is gone."""
    at_exit = functools.partial(_end, monitor, weakref.ref(thread))
    atexit.register(at_exit)
    weakref.finalize(thread, atexit.unregister, at_exit).atexit = False


def _end(monitor: Monitor, reference: "weakref.ref[threading.Thread]") -> None:
    monitor.close()
    thread = reference()
    if thread is not None:
        thread.join(monitor.timeout)
