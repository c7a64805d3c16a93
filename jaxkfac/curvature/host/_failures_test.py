import dataclasses
import gc
import threading

import jax
import numpy as np
import pytest

from jaxkfac._errors import NonFiniteFactorError
from jaxkfac.blocks._random_factors_test import random_factors
from jaxkfac.curvature import reconstruct
from jaxkfac.curvature.host import _average, _decompose
from jaxkfac.curvature.host._service_test import (
    LAYERS,
    Gate,
    assert_close,
    service,
    steps_of,
    threads,
    until,
    with_nan,
)


@pytest.fixture(scope="module")
def factors():
    return [random_factors(LAYERS, jax.random.key(i)) for i in range(9)]


def test_a_failing_layer_keeps_its_basis_for_a_while_and_then_raises(factors):
    options = {"refresh_every": 1, "lag": 1, "keep_previous": 2}
    with service(**options) as running, service(**options) as healthy:
        running.push(factors[0], 0)
        healthy.push(factors[0], 0)
        first = running.bases(0)
        for step in (1, 2):
            running.push(with_nan(factors[step], "k"), step)
            healthy.push(factors[step], step)
        with pytest.warns(RuntimeWarning, match="basis of G of layer 'k' is kept, refresh 1 of"):
            running.push(factors[3], 3)  # the refresh of step 1 makes way for that of step 2
        with pytest.warns(RuntimeWarning, match="is kept, refresh 2 of at most 2"):
            kept = running.bases(3)
        assert np.array_equal(kept["k"].g_vectors, first["k"].g_vectors)
        healthy.push(factors[3], 3)
        assert np.array_equal(kept["q"].g_vectors, healthy.bases(3)["q"].g_vectors)
        assert running.left_out == {"G of layer 'k'": 2}
        assert running.kept == {"G of layer 'k'": 2}
        running.push(with_nan(factors[4], "k"), 4)
        running.bases(4)  # step 3 was finite
        assert running.kept == {}
        for step in (5, 6):
            running.push(with_nan(factors[step], "k"), step)
            with pytest.warns(RuntimeWarning):
                running.bases(step)
        running.push(factors[7], 7)
        for _ in range(2):
            with pytest.raises(NonFiniteFactorError, match="'k'"):
                running.bases(7)


def test_one_bad_layer_leaves_the_average_of_all_readable(factors):
    with service() as running, service() as healthy, service() as empty:
        for step in range(3):
            running.push(with_nan(factors[step], "k") if step == 1 else factors[step], step)
            healthy.push(factors[step], step)
        found, expected = running.average(), healthy.average()
        others = [name for name in expected if name != "k"]
        assert_close([found[name] for name in others], [expected[name] for name in others], tol=0)
        decay, (first, _, third) = 0.9 * 0.9, factors[:3]
        sums = decay * first.g_sums["k"] + third.g_sums["k"]
        assert_close(found["k"].g, sums / (decay * first.terms + third.terms))
        empty.push(with_nan(factors[0], "k"), 0)
        with pytest.raises(ValueError, match="G of layer 'k' has no contribution; 1 were left out"):
            empty.average()


def test_an_average_that_overflows_keeps_the_basis_and_then_recovers(factors):
    large = {**factors[1].g_sums, "k": 3e38 * np.eye(4, dtype=np.float32)}
    large = dataclasses.replace(factors[1], g_sums=large)
    with service(refresh_every=1, lag=0, decay=0.99) as running:
        running.push(large, 0)
        first = running.bases(0)
        running.push(large, 1)
        with pytest.warns(RuntimeWarning, match="G of layer 'k'.*overflow.* basis of .* is kept"):
            kept = running.bases(1)
        assert kept["k"].g_values is not None and running.left_out == {"G of layer 'k'": 1}
        assert np.array_equal(kept["k"].g_raw_values, first["k"].g_raw_values)
        running.push(factors[2], 2)
        rebuilt = reconstruct(running.bases(2))
    assert_close(rebuilt["k"].g, factors[2]["k"].g)


def test_a_first_decomposition_that_fails_raises_at_once(factors):
    with service() as running:
        running.push(with_nan(factors[0], "stacked"), 0)
        with pytest.raises(NonFiniteFactorError, match="G of layer 'stacked': all 1 contrib"):
            running.bases(0)


def test_a_failed_decomposition_is_retried_with_numpy(factors, monkeypatch):
    from jaxkfac.linalg.spectral import _eigh_host

    def nothing(host, dtype):
        return _eigh_host.HostSpectrum(np.full(host.shape[:-1], np.nan), None)

    monkeypatch.setattr(_eigh_host, "_first_try", nothing)
    with service(max_condition=np.inf) as running:
        rebuilt = reconstruct(steps_of(running, factors[:1])[0])
    assert_close(rebuilt, {name: factors[0][name] for name in rebuilt})


def test_a_slice_of_a_stack_is_called_by_its_index(factors, monkeypatch):
    names, eigh = [], _decompose.eigh_on_host
    monkeypatch.setattr(
        _decompose, "eigh_on_host", lambda x, **k: names.append(k["name"]) or eigh(x, **k)
    )
    with service() as running:
        steps_of(running, factors[:1])
    slices = [f"G of layer 'stacked' at stack index ({i},)" for i in range(3)]
    assert sorted(x for x in names if x.startswith("G of layer 'stacked'")) == slices
    assert "G of layer 'k'" in names


@pytest.mark.parametrize("kind", [RuntimeError, SystemExit, KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("where", ["worker", "average"])
def test_an_exception_in_a_thread_reaches_the_caller_and_ends_all_threads(
    factors, monkeypatch, kind, where
):
    def broken(*_, **__):
        raise kind("injected")

    module, name = (_decompose, "eigh_on_host") if where == "worker" else (_average, "pack")
    monkeypatch.setattr(module, name, broken)
    running = service()
    with pytest.raises(kind, match="injected") as caught:
        steps_of(running, factors)
    if where == "average":
        assert "averaged A of layer 'q' of step 0" in caught.value.__notes__[0]
    for again in (lambda: running.push(factors[1], 1), lambda: running.bases(1), running.flush):
        with pytest.raises(kind, match="injected"):
            again()
    until(lambda: not threads())
    running.close()  # the error has been told


def test_close_tells_an_error_that_nobody_has_seen(factors, monkeypatch):
    pushed = threading.Event()

    def broken(*_, **__):
        assert pushed.wait(60)  # a push after the error would tell it
        raise ValueError("injected")

    monkeypatch.setattr(_decompose, "eigh_on_host", broken)
    running = service()
    running.push(factors[0], 0)
    running.push(factors[1], 1)
    pushed.set()
    until(lambda: running._monitor.stopped)
    with pytest.raises(ValueError, match="injected"):
        running.close()
    running.close()


def test_a_closed_service_says_so_and_has_no_threads(factors):
    running = service()
    running.push(factors[0], 0)
    running.close()
    running.close()
    assert not threads()
    for call in (lambda: running.push(factors[1], 1), lambda: running.bases(1), running.flush):
        with pytest.raises(RuntimeError, match="is closed"):
            call()


@pytest.mark.slow
def test_a_forgotten_service_ends_its_threads(factors):
    running = service()
    running.push(factors[0], 0)
    running.bases(0)
    del running
    gc.collect()
    until(lambda: not threads())


def test_every_wait_has_an_end(factors, monkeypatch):
    running = service(timeout=0.1)
    gate = Gate(monkeypatch)
    running.push(factors[0], 0)
    with pytest.raises(TimeoutError, match="waited 0.1 s for the decomposition of the refresh at"):
        running.bases(0)
    until(lambda: gate.calls)  # on a busy machine it may not have begun, and close would drop it
    with pytest.raises(TimeoutError, match="jaxkfac-eigh-0 still runs"):
        running.close()
    gate.open.set()
    until(lambda: not threads())
    running.close()
