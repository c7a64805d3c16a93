"""The threads of a service: a condition that they share, and queues of jobs."""

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

    A caller that was interrupted cannot know whether its job is queued, so it queues it again.

    Attributes:
        call: The function to call; ``None`` once it has been called.
    """

    call: Callable[[], None] | None


class Monitor:
    """Shared by the threads of a service to signal progress, the first error, and the end.

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
        """Change shared state, then wake all threads that wait for it."""
        with self._condition:
            yield
            self._condition.notify_all()

    def on_stop(self, call: Callable[[], None]) -> None:
        """Register ``call`` to run once work is over."""
        self._on_stop.append(call)

    def fail(self, error: BaseException) -> None:
        """Stop all work because of ``error``; the first error is kept for the caller."""
        with self.changing():
            if self.stopped:
                return
            self._error, self._untold, self.stopped = error, True, True
        self._stop()

    def close(self) -> None:
        """Stop all work; does nothing in a forked process, which has no threads."""
        if self._process != os.getpid():
            return  # a thread may have held the condition when the process was forked
        with self.changing():
            self.stopped = True
        self._stop()

    def _stop(self) -> None:
        for call in self._on_stop:
            call()

    def check_process(self, doing: str) -> None:
        """Refuse a forked process, which has no threads; this takes no lock."""
        if self._process != os.getpid():
            raise RuntimeError(
                f"{doing}: this HostCurvature was made in process {self._process}, and its threads "
                f"are not in process {os.getpid()}, which was forked from it; call it in the "
                "process that made it, or make one after the fork"
            )

    def check(self, doing: str) -> None:
        """Raise the error of another thread, or an error if the service is closed."""
        # Before `stopped`: a failure also stops the service, and "closed" would hide it.
        if self._error is not None:
            self._untold = False
            raise self._error
        if self.stopped:
            raise RuntimeError(f"{doing}: this HostCurvature is closed; make a new one")

    def untold(self) -> BaseException | None:
        """The error that no caller has seen yet; returned only once."""
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
                # First, so that a failure ends the wait even if its condition has become true.
                self.check(f"waiting for {what}")
                if ready():
                    return
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise TimeoutError(
                        f"waited {self.timeout:g} s for {what}; if that is only slow, pass a "
                        "larger timeout= to HostCurvature"
                    )
                # Woken by each change (`changing`), not by a timer: the time limit only bounds the
                # wait.
                self._condition.wait(remaining)


class _Ahead(threading.local):
    """Keys of the bytes that a thread has reserved before it queues the jobs that hold them."""

    keys: tuple[object, ...] = ()


class Workers:
    """A first-in, first-out queue of jobs and its threads; with one thread they run in order.

    Jobs may hold bytes, which are taken under keys before a job is queued and returned when it is
    done and released. A job above the limit runs alone. An exception that interrupts a
    call at any point leaves nothing half done: bytes are taken or not, and a job that is queued
    twice runs once.

    An exception of any kind in a job stops all workers of the monitor and reaches the
    caller at the next call.

    The threads are daemons, and an interpreter that ends stops them first. It waits for running
    jobs, because a thread that computes in XLA while the interpreter shuts down ends the process by
    ``std::terminate``. A job that takes longer than the time limit is not waited for.

    Args:
        name: Name of the threads.
        threads: Number of threads.
        monitor: Shared by all workers of a service.
        limit: Bytes that jobs may hold together.

    Attributes:
        most: The most bytes that were taken at any time.
    """

    def __init__(self, name: str, threads: int, monitor: Monitor, limit: int = 0) -> None:
        self.most = 0
        self._sizes: dict[object, int] = {}
        self._queued: set[Job] = set()
        self._limit, self._monitor, self._ahead = limit, monitor, _Ahead()
        # SimpleQueue: its ``put`` is safe in a finalizer, which may interrupt another ``put``.
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
        """Number of bytes taken."""
        return sum(self._sizes.values())

    @property
    def idle(self) -> bool:
        """Whether every job has been done; ask under the monitor's condition."""
        return all(job.call is None for job in self._queued)

    def take(self, sizes: Mapping[object, int], what: str) -> None:
        """Wait until bytes fit within the limit, then take them, each size under its key.

        Bytes that this thread has reserved with :meth:`room` are used first.
        """
        with self._monitor.changing():
            needed, after = sum(sizes.values()), dict(sizes)
            for key in reversed(self._ahead.keys):
                used = min(self._sizes[key], needed)
                after[key] = self._sizes[key] - used
                needed -= used

            def fits() -> bool:
                # A job above the limit runs when nothing else is in flight; it would never fit
                # otherwise.
                return self.taken == 0 or self.taken + needed <= self._limit

            if needed:
                message = f"room for {what}: {needed} bytes beside those in flight"
                self._monitor.wait_for(fits, f"{message}, limit {self._limit}")
            self._sizes.update(after)  # in one step, so that an interrupt cannot split it
            self.most = max(self.most, self.taken)

    def give_back(self, key: object) -> None:
        """Return the bytes taken under ``key``, if any."""
        with self._monitor.changing():
            self._sizes.pop(key, None)

    @contextlib.contextmanager
    def room(self, nbytes: int) -> Iterator[None]:
        """Reserve ``nbytes`` for what this thread takes in the block; return unused bytes."""
        outer, key = self._ahead.keys, object()
        try:
            # Bytes that an outer block has reserved are for its own pushes, not for this
            # reservation.
            self._ahead.keys = ()
            self.take({key: nbytes}, "factors about to be dispatched")
            self._ahead.keys = (*outer, key)
            yield
        finally:
            self._ahead.keys = outer
            self.give_back(key)

    def put(self, job: Job) -> None:
        """Queue a job; a job that is queued twice still runs once."""
        # The job is queued before it is registered: an interrupt in between leaves a job that runs
        # unobserved; the other order would leave a registered job that never runs.
        self._jobs.put(job)
        with self._monitor.changing():
            if job.call is not None:
                self._queued.add(job)

    def join(self, deadline: float) -> list[str]:
        """Wait until ``deadline`` (``time.monotonic``); return names of threads still running."""
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
                job.call = None  # it holds arrays, and waiting threads may need their memory
                self._queued.discard(job)
            del job
        try:
            while True:
                self._jobs.get_nowait()  # jobs that will not run hold arrays too
        except queue.Empty:
            self._wake()  # the next thread ends as well


def call_in_time(call: Callable[[], None], timeout: float, what: str) -> None:
    """Call a function that may wait for other processes; abandon its thread on timeout.

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
    """Close at exit, until the thread ends; atexit runs it before JAX's own, registered earlier."""
    at_exit = functools.partial(_end, monitor, weakref.ref(thread))
    atexit.register(at_exit)
    weakref.finalize(thread, atexit.unregister, at_exit).atexit = False


def _end(monitor: Monitor, reference: "weakref.ref[threading.Thread]") -> None:
    monitor.close()
    thread = reference()
    if thread is not None:
        thread.join(monitor.timeout)
