import dataclasses

import jax
import jax.numpy as jnp
import jaxtyping
import pytest

from jaxkfac.blocks._random_factors_test import layer, random_factors
from jaxkfac.curvature.host import HostCurvature
from jaxkfac.curvature.host._push import as_step
from jaxkfac.curvature.host._service_test import LAYERS, LIKE, same, service, threads


@pytest.fixture(scope="module")
def factors():
    return [random_factors(LAYERS, jax.random.key(i)) for i in range(9)]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"decay": 1.0}, "decay must be in"),
        ({"lag": 5}, "lag=5 is longer than the 4 steps between two refreshes"),
        ({"stagger": 4}, "lag=2 is longer than the 1 steps"),
        ({"stagger": 3}, "stagger=3 must divide refresh_every=4"),
        ({"lag": -1}, "lag must be zero or positive"),
        ({"refresh_every": 0}, "refresh_every must be at least 1"),
        ({"max_condition": 0.5}, "max_condition must be at least 1"),
        ({"timeout": 0.0}, "timeout must be positive"),
        ({"reuse_tolerance": 1.5}, "reuse_tolerance must be in"),
        ({"dtype": "bfloat16"}, "dtype must be one of.*bfloat16"),
        ({"initial": "identity"}, "needs like="),
        ({"disk": "/nowhere/at/all"}, "is no folder"),
        ({"host_bytes": 100, "like": LIKE}, "host_bytes=100 is too small.*raise host_bytes"),
        ({"host_bytes": 2500, "like": LIKE}, "host_bytes=2500 is too small.*folder as disk="),
    ],
)
def test_bad_arguments_are_named(bad, message):
    with pytest.raises(ValueError, match=message):
        service(**bad)
    assert not threads()


@pytest.mark.parametrize("good", [{"lag": 4}, {"lag": 0}, {"stagger": 2, "lag": 2}])
def test_the_lag_may_be_as_long_as_the_steps_between_two_refreshes(good):
    service(**good).close()


@pytest.fixture
def unchecked(monkeypatch):
    """As in a user's process, where the runtime type hook is not."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("bad", [{"lag": 1.5}, {"workers": 1.0}, {"refresh_every": "4"}])
def test_what_counts_is_an_integer(bad):
    (name, value), *_ = bad.items()
    with pytest.raises(ValueError, match=f"{name} must be an integer, got {value!r}"):
        service(**bad)
    assert not threads()


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
def test_other_things_than_factors_are_refused(factors):
    with service() as running, pytest.raises(TypeError, match="the Factors .*, got dict"):
        running.push({"a_sums": factors[0].a_sums}, 0)


def test_several_workers_need_single_threaded_blas(monkeypatch):
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "4")
    with pytest.raises(ValueError, match="workers=2 needs OPENBLAS_NUM_THREADS=1"):
        service(workers=2)


def test_bad_pushes_are_named_and_leave_nothing_behind(factors):
    other = random_factors((layer("w", (3, 2)),), jax.random.key(0))
    wide = dataclasses.replace(factors[0], g_sums={"q": jnp.zeros((5, 5))})
    flat = dataclasses.replace(factors[0], g_sums={"q": jnp.zeros((3, 7))})
    late = dataclasses.replace(factors[0], g_sums={"stacked": factors[0].g_sums["stacked"][:2]})
    strange = dataclasses.replace(factors[0], g_sums={"kk": jnp.zeros((4, 4))})
    part = dataclasses.replace(factors[0], g_sums={})
    with service() as running:
        with pytest.raises(ValueError, match="no factors have been pushed"):
            running.bases(3)
        running.push(factors[0], 3)
        running.bases(3)
        for bad, message in (
            (other, "factors have the layer 'w', which was not expected"),
            (wide, r"G of layer 'q' has shape \(5, 5\), expected \(4, 4\)"),
            (flat, r"G of layer 'q' has shape \(3, 3\), expected \(4, 4\)"),
            (strange, "g of 'kk' belongs to no layer; the nearest are 'k'"),
        ):
            with pytest.raises(ValueError, match=message):
                running.push(bad, 4)
        with pytest.raises(ValueError, match="'stacked' has iterations 2 to 4, of 3"):
            running.push(dataclasses.replace(late, a_sums={}, diagonals={}), 4, first_iteration=2)
        for step, message in ((2, "push at step 2, but step 3"), (-1, "zero or positive")):
            with pytest.raises(ValueError, match=message):
                running.push(factors[0], step)
        with pytest.raises(ValueError, match="step must be an integer, got 3.0"):
            as_step(3.0)
        with pytest.raises(ValueError, match="bases at step 2, but step 3"):
            running.bases(2)
        assert same(running.average(), factors[0])
    with service() as running:
        running.push(part, 0)
        with pytest.raises(ValueError, match="needs G of layer 'q', which has never been pushed"):
            running.bases(0)
        running.push(dataclasses.replace(factors[0], a_sums={}, diagonals={}), 0)
        assert same(running.average(), factors[0])
        running.bases(0)


@pytest.mark.parametrize("size", ["100XB", "0GB", "a lot"])
@pytest.mark.parametrize("name", ["host_bytes", "in_flight_bytes"])
def test_sizes_have_units(name, size, tmp_path):
    with pytest.raises(ValueError, match=f'{name}={size!r}: expected .*"74.5GiB"'):
        service(**{name: size})
    with service(**{name: "1 MiB"}) as running:
        running.save(tmp_path / "saved")
        assert getattr(running._state.options, name) == 2**20
    with pytest.raises(ValueError, match=f"{name}={size!r}"):
        HostCurvature.load(tmp_path / "saved", **{name: size})
    assert not threads()
