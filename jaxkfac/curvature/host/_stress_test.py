import os
import random
import subprocess
import sys
import textwrap
import threading
import time

import jax
import numpy as np
import pytest

from jaxkfac._errors import NonFiniteFactorError
from jaxkfac.blocks._random_factors_test import layer, random_factors
from jaxkfac.curvature.host import _average, _decompose
from jaxkfac.curvature.host._service_test import LAYERS, LIKE, same, service, threads, until

SMALL = (layer("a", (2, 3), bias="b"), layer("c", (2, 3, 2), stack=1))


def jittered(monkeypatch, seed, seconds):
    """Every decomposition and every contribution takes some time of its own."""
    rng, solve, advance = random.Random(seed), _decompose.eigh_on_host, _average._advance

    def slow_solve(matrix, *, name, dtype):
        time.sleep(rng.random() * seconds)
        return solve(matrix, name=name, dtype=dtype)

    def slow_advance(*args):
        if rng.random() < 0.05:
            time.sleep(rng.random() * seconds)
        return advance(*args)

    monkeypatch.setattr(_decompose, "eigh_on_host", slow_solve)
    monkeypatch.setattr(_average, "_advance", slow_advance)


@pytest.mark.parametrize("seed", [0, 1])
def test_results_are_bitwise_the_same_whatever_the_timing(monkeypatch, seed):
    factors = [random_factors(LAYERS, jax.random.key(i)) for i in range(10)]
    options = {"refresh_every": 2, "lag": 1, "initial": "identity", "like": LIKE}
    with service(**options) as calm:
        expected = []
        for step, each in enumerate(factors):
            calm.push(each, step)
            expected.append(jax.tree.map(np.asarray, calm.bases(step)))
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    jittered(monkeypatch, seed, 0.01)
    with service(**options, workers=3, in_flight_bytes=200) as hurried:
        for step, each in enumerate(factors):
            hurried.push(each, step)
            time.sleep(0.003 * (step % 3))
            assert same(hurried.bases(step), expected[step]), step


@pytest.mark.exhaustive
def test_thousands_of_pushes_with_jitter_and_non_finite_factors(monkeypatch):
    """2100 pushes equal the average written out, however the threads were delayed."""
    rng = np.random.default_rng(0)
    pool = [jax.tree.map(np.asarray, random_factors(SMALL, jax.random.key(i))) for i in range(7)]
    bad = jax.tree.map(np.copy, pool[0])
    bad.g_sums["a"][1, 2] = np.inf
    jittered(monkeypatch, 3, 0.0005)
    expected = jax.tree.map(np.zeros_like, pool[0])
    terms_a, decay, handed = np.float32(0), np.float32(0.9), set()
    with service(refresh_every=20, lag=7, in_flight_bytes=300) as running:
        for step in range(700):
            expected = jax.tree.map(lambda x: decay * x, expected)
            terms_a *= decay
            for micro in range(3):
                broken = micro == 2 and step % 50 == 49
                new = bad if broken else pool[int(rng.integers(7))]
                running.push(new, step)
                before = expected.g_sums["a"]
                expected = jax.tree.map(np.add, expected, new)
                if broken:  # only that factor is left out, with its count
                    expected.g_sums["a"] = before
                else:
                    terms_a += new.terms
            handed.add(id(running.bases(step)))
        running.flush()
        assert running.left_out == {"G of layer 'a'": 14}
        held = running._state.averages.running
        assert np.array_equal(
            running._state.averages.view(running._state.layout.entries["g", "c"], 700).total((1,)),
            expected.g_sums["c"][1],
        )
        assert np.array_equal(held["g", "a"].count, terms_a)
        assert np.array_equal(held["a", "a"].count, expected.a_counts["a"])
        assert running._averaging.most <= 300
    assert len(handed) > 10 and not threads()


def train(running, factors):
    for step in range(2000):
        running.push(factors, step)
        running.bases(step)


@pytest.mark.default(2, slow=1)
@pytest.mark.parametrize("seed", range(6))
def test_an_injected_failure_ends_in_an_error_and_never_in_a_hang(monkeypatch, seed):
    """Failures at a random point of either thread, under jitter; the caller always learns."""
    rng = random.Random(seed)
    jittered(monkeypatch, seed, 0.002)
    where = rng.choice(["solve", "advance"])
    module, name = {
        "solve": (_decompose, "eigh_on_host"),
        "advance": (_average, "_advance"),
    }[where]
    real, left = getattr(module, name), [rng.randrange(10, 60)]
    kind = rng.choice([RuntimeError, SystemExit, OSError, NonFiniteFactorError])

    def failing(*args, **kwargs):
        left[0] -= 1
        if left[0] < 0:
            raise kind("injected")
        return real(*args, **kwargs)

    monkeypatch.setattr(module, name, failing)
    factors = jax.tree.map(np.asarray, random_factors(SMALL, jax.random.key(0)))
    start = time.monotonic()
    with (
        pytest.raises(kind, match="injected"),
        service(refresh_every=2, lag=2, in_flight_bytes=100, keep_previous=0) as running,
    ):
        train(running, factors)
    assert time.monotonic() - start < 60
    until(lambda: not threads())


def test_close_from_another_thread_wakes_a_push_that_waits(monkeypatch):
    factors = jax.tree.map(np.asarray, random_factors(SMALL, jax.random.key(0)))
    begun, gate = threading.Event(), threading.Event()

    def blocked(*_):
        begun.set()
        assert gate.wait(60)

    monkeypatch.setattr(_average, "_advance", blocked)
    running = service(in_flight_bytes=1)
    caught = []

    def push():
        try:
            for step in range(3):
                running.push(factors, step)
        except RuntimeError as error:
            caught.append(error)

    pusher = threading.Thread(target=push)
    pusher.start()
    assert begun.wait(60)
    timer = threading.Timer(0.05, gate.set)
    timer.start()
    running.close()
    pusher.join(60)
    timer.join()
    assert not pusher.is_alive() and "is closed" in str(caught[0])


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "how",
    [
        "asleep",
        "error",
        pytest.param("solving", marks=pytest.mark.exhaustive),
        pytest.param("forgotten", marks=pytest.mark.exhaustive),
    ],
)
def test_an_interpreter_ends_without_close(how):
    program = f"""
        import threading, time
        import jax
        from jaxkfac.curvature.host import HostCurvature, _decompose
        from jaxkfac.blocks._random_factors_test import layer, random_factors
        how, begun, solve = {how!r}, threading.Event(), _decompose.eigh_on_host
        def eigh(matrix, *, name, dtype):
            begun.set()
            if how == "asleep":
                time.sleep(1000)
            end = time.monotonic() + 1.5
            while time.monotonic() < end:  # in and out of XLA, which must not be cut short
                spectrum = solve(matrix, name=name, dtype=dtype)
            return spectrum
        _decompose.eigh_on_host = eigh
        factors = random_factors((layer("a", (3, 60)),), jax.random.key(0), rows=2)
        limit = 0.3 if how == "asleep" else 60.0  # the one sleeps longer than that, on purpose
        service = HostCurvature(refresh_every=1, lag=1, timeout=limit)
        service.push(factors, 0)
        service.push(factors, 1)
        assert begun.wait(120)
        if how == "forgotten":
            del service
        if how == "error":
            raise KeyError("of the user")
        print("end")
    """
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=300,  # far from the 1000 s of the one that sleeps
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        check=False,
    )
    if how == "error":
        assert out.returncode == 1 and "of the user" in out.stderr
    else:
        assert out.returncode == 0 and out.stdout == "end\n", out.stderr
