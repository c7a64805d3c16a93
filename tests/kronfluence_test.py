"""Runs of kronfluence 1.0.1 are continued: its files, written by `python -m benchmarks.uses`."""

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkfac as jk
from benchmarks._uses.influence import margin
from jaxkfac.uses import load_kronfluence

FILES = Path(__file__).parent / "kronfluence"
NAMES = {f"layers.{i}.w": f"layers.{i}" for i in range(3)}
pytestmark = pytest.mark.usefixtures("x64")


def model(p, x):
    for i in range(3):
        x = (jnp.tanh(x) if i else x) @ p[f"layers.{i}.w"] + p[f"layers.{i}.b"]
    return x


def problem():
    """Its own objective, parameters, examples and queries, and the scores that it gave them."""
    found = {k: jnp.asarray(v) for k, v in np.load(FILES / "problem.npz").items()}
    params = {k: v for k, v in found.items() if k.startswith("layers")}
    batches = [(found[f"{x}inputs"], found[f"{x}targets"]) for x in ("", "q_")]
    return jk.Objective(model, jk.Categorical()), params, *batches, found


def loaded(objective, params, train, folder=FILES, **options):
    like = jk.value_grad_and_factors(objective).factor_shapes(params, train)
    return load_kronfluence(folder, like, **{"terms_per_example": 1, "names": NAMES, **options})


@pytest.mark.slow
def test_bases_that_were_read_give_the_scores_that_kronfluence_gave():
    objective, params, train, queries, found = problem()
    bases = loaded(objective, params, train)
    scores = jk.influence(objective, params, bases, queries, train)
    own = jk.self_influence(objective, params, bases, train)
    np.testing.assert_allclose(scores, found["pairwise"], rtol=1e-9)
    np.testing.assert_allclose(own, found["own"], rtol=1e-9)


@pytest.mark.slow
def test_a_measurement_gives_the_scores_that_kronfluence_gave_its_own():
    objective, params, train, queries, found = problem()
    bases = loaded(objective, params, train)
    scores = jk.influence(objective, params, bases, queries, train, measurement=margin)
    np.testing.assert_allclose(scores, found["margin"], rtol=1e-9)


@pytest.mark.exhaustive
def test_bases_of_covariances_alone_are_those_of_the_same_factors(tmp_path):
    for file in FILES.glob("*covariance*"):
        shutil.copy(file, tmp_path)
    objective, params, train, queries, _ = problem()
    bases = loaded(objective, params, train, folder=tmp_path)
    factors = jk.value_grad_and_factors(objective)(params, train).factors
    expected = jk.eigendecompose(factors, max_condition=float("inf"))
    for name in NAMES:
        np.testing.assert_allclose(bases[name].a_values, expected[name].a_values, atol=1e-12)
        np.testing.assert_allclose(bases[name].g_values, expected[name].g_values, atol=1e-12)
    args = objective, params
    np.testing.assert_allclose(
        jk.influence(*args, bases, queries, train, damping=0.1),
        jk.influence(*args, expected, queries, train, damping=0.1),
        rtol=1e-9,
    )


@pytest.mark.slow
def test_terms_of_an_example_divide_the_measured_values():
    objective, params, train, *_ = problem()
    one, four = (loaded(objective, params, train, terms_per_example=n) for n in (1, 4))
    for name in NAMES:
        np.testing.assert_allclose(one[name].raw_values, 4 * four[name].raw_values)


def test_convolutions_whose_inputs_lie_in_another_order_are_refused():
    def windows(p, x):
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            x, p["k"], (1, 1), "SAME", dimension_numbers=numbers
        ).mean((1, 2))

    params = {"k": jnp.ones((2, 2, 1, 2))}
    batch = jnp.ones((3, 4, 4, 1)), jnp.asarray([0, 1, 1])
    with pytest.raises(ValueError, match=r"'k' is a convolution, .*\(C_in, kh, kw\)"):
        loaded(jk.Objective(windows, jk.Categorical()), params, batch, names={"k": "layers.0"})


def test_what_does_not_fit_is_named(tmp_path):
    objective, params, train, *_ = problem()
    for options, error, message in (
        ({"names": {"layers.0.w": "layers.9"}}, jk.UnknownLayerError, "no module 'layers.9'"),
        ({"names": {"up": "layers.0"}}, jk.UnknownLayerError, "no layer 'up'"),
        ({"names": {"layers.0.w": "layers.1"}}, ValueError, r"expected a tensor \(3, 3\)"),
        ({"terms_per_example": 0}, ValueError, "terms_per_example"),
        ({"folder": tmp_path}, FileNotFoundError, "activation_covariance"),
    ):
        with pytest.raises(error, match=message):
            loaded(objective, params, train, **options)
