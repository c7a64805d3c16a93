"""A process that was forked has none of the threads, and may have their locks."""

import contextlib
import os
import pickle
import select
import signal
import threading

import jax
import numpy as np
import pytest

from jaxkfac.blocks._random_factors_test import random_factors
from jaxkfac.curvature.host._service_test import LAYERS, service

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here"),
    pytest.mark.filterwarnings("ignore"),  # Python and JAX both warn of forks
]
CALLS = {
    "push": lambda running, factors: running.push(factors, 1),
    "bases": lambda running, factors: running.bases(1),
    "flush": lambda running, factors: running.flush(),
    "average": lambda running, factors: running.average(),
    "save": lambda running, factors: running.save("nowhere"),
    "room": lambda running, factors: running.room(8).__enter__(),
}


@pytest.fixture(scope="module")
def factors():
    return jax.tree.map(np.asarray, random_factors(LAYERS, jax.random.key(0)))


def said_in_a_fork(call) -> str:
    """What ``call()`` raises in a child process; a child that waits is killed."""
    reader, writer = os.pipe()
    if not (child := os.fork()):
        words = "nothing was raised"
        try:
            call()
        except BaseException as error:
            words = f"{type(error).__name__}: {error}"
        os.write(writer, words.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        if not select.select([answer], [], [], 30)[0]:
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return answer.read() or "it waited"


@contextlib.contextmanager
def held_elsewhere(*locks):
    """Another thread holds the locks: in a forked process nobody ever lets go of them."""
    taken, done = threading.Event(), threading.Event()

    def hold():
        with contextlib.ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock)
            taken.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert taken.wait(60)
        yield
    finally:
        done.set()
        thread.join()


@pytest.mark.default(1, slow=0)
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CALLS)
def test_a_forked_process_fails_at_once_with_the_reason(name, factors):
    with service() as running:
        running.push(factors, 0)
        running.flush()
        with held_elsewhere(running._lock, running._monitor._condition):
            said = said_in_a_fork(lambda: CALLS[name](running, factors))
        assert said.startswith(f"RuntimeError: {name}: this HostCurvature was made in process")
        assert "make one after the fork" in said
        running.push(factors, 1)  # the parent goes on


def test_a_forked_process_leaves_the_service_without_waiting(factors):
    with service() as running:
        with held_elsewhere(running._monitor._condition):
            assert said_in_a_fork(running.close) == "nothing was raised"
        running.push(factors, 0)
        assert running.bases(0)["k"] is not None


def test_a_service_is_not_sent_to_another_process():
    with service() as running, pytest.raises(TypeError, match=r"save\(\) it and load\(\) it"):
        pickle.dumps(running)
