"""What the pages say trains: nothing ends above its first loss, at the default and around it."""

from typing import Any

import pytest

import jaxkfac as jk
from benchmarks.optimizers._kfac import documented
from benchmarks.optimizers._method import here
from benchmarks.optimizers.methods import METHODS
from benchmarks.optimizers.problems import PROBLEMS

# Steps of a run here; the small problems take their own hundred. Whole runs of the others are for
# benchmarks.optimizers. The first steps may overshoot: with a rate of 0.03 the loss of Burgers'
# equation is above its first at step 60, and at 0.09 of it at step 150.
STEPS = {"poisson": 60, "burgers": 150, "decoder": 6, "autoencoder": 10, "vit": 15}
STEPS |= {"convolution": 30, "diffusion": 30}
LARGE = ("autoencoder", "decoder", "vit")  # the documented rate alone: the decade takes minutes
QUICK = ("perceptron", "scaled_regression")
NEEDS_DOWNLOAD = ("resnet",)  # Fashion-MNIST


def losses_of(problem: Any, method: Any, setting: Any, data: Any) -> list[float]:
    """The first loss of a training and its last, of one seed."""
    curve = method.run(
        problem, data, setting, seed=0, budget=0.0, steps=STEPS.get(problem.name, problem.steps)
    )
    found = [x for x in curve["loss"][1:] if x is not None]
    assert len(found) == len(curve["loss"]) - 1, "a loss was not finite"
    return [found[0], found[-1]]


def mark_of(name: str) -> pytest.MarkDecorator:
    """Two of the quick ones are slow; other kinds of model are among tests/scripts."""
    return pytest.mark.sampled(2) if name in QUICK else pytest.mark.exhaustive


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "method"),
    [
        pytest.param(name, method, marks=mark_of(name))
        for method in ("kfac", "kfac_rate", "kfe_adam")
        for name in PROBLEMS
        if name not in NEEDS_DOWNLOAD
    ],
)
def test_no_training_ends_above_its_first_loss(name, method):
    problem, data = PROBLEMS[name], PROBLEMS[name].data()
    settings = METHODS[method].documented
    rates = [setting.get("learning_rate") for setting in settings]
    assert rates == [None] or max(rates) / min(rates) == pytest.approx(10)  # a decade
    for setting in settings[:1] if name in LARGE else settings:
        first, last = losses_of(problem, METHODS[method], setting, data)
        assert last < first, setting


@pytest.mark.slow
def test_a_training_that_diverges_would_be_seen():
    """The settings that the pages gave before: damping 1e-3, no constraint."""
    before = here(
        documented(
            lambda like, setting: jk.kfac(1e-2, like=like, damping=1e-3, norm_constraint=None),
            every=1,
        )
    )
    problem = PROBLEMS["perceptron"]
    curve = before(problem, problem.data(), {}, seed=0, budget=0.0, steps=30)
    assert not (curve["loss"][-1] or float("inf")) < curve["loss"][1]
