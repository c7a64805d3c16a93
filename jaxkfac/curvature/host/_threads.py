"""Queues of jobs and the threads that do them."""

import atexit
import functools
import queue
import threading
import time
import weakref
from collections.abc import Callable

from jaxkfac.curvature.host._monitor import Monitor

Job = Callable[[], None]


class Lane:
    """A first-in, first-out queue of jobs; with one thread, they are done in order.

    An exception in a job, of whatever kind, stops every lane of the monitor and reaches the
    caller at the next call.

    The threads are daemons, and an interpreter that ends stops them first: it waits for the jobs
    that are being done, because one that computes in XLA while the interpreter is taken apart
    ends the process by ``std::terminate``. Only what takes longer than the time limit is left
    to itself.

    Args:
        name: Of the threads.
        threads: How many.
        monitor: Shared by all lanes of a service.
    """

    def __init__(self, name: str, threads: int, monitor: Monitor) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(
                target=_work, args=(self._jobs, monitor), name=f"{name}-{i}", daemon=True
            )
            for i in range(threads)
        ]
        monitor.on_stop(self._wake)
        for thread in self._threads:
            _stop_at_exit(thread, monitor)
            thread.start()

    def put(self, job: Job) -> None:
        """Queue a job."""
        self._jobs.put(job)

    def _wake(self) -> None:
        self._jobs.put(None)

    def join(self, deadline: float) -> list[str]:
        """Wait until ``deadline`` (``time.monotonic``); the names of threads that still run."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(deadline - time.monotonic(), 0))
        return [thread.name for thread in self._threads if thread.is_alive()]


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


def _work(jobs: "queue.SimpleQueue[Job | None]", monitor: Monitor) -> None:
    while True:
        job = jobs.get()
        if job is None or monitor.stopped:
            break
        try:
            job()
        except BaseException as error:
            monitor.fail(error)
        del job  # it holds arrays, and the next get may wait for long
    try:
        while True:
            jobs.get_nowait()  # jobs that will not be done hold arrays too
    except queue.Empty:
        jobs.put(None)  # the next thread of the lane ends as well
