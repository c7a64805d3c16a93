"""EKFAC measures what is made outside the library as it measures the library's own."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac.curvature import correct_eigenvalues, eigendecompose
from jaxkfac.factors import Categorical, Estimator, Objective, value_grad_and_factors
from jaxkfac.factors._fisher import Exact, Forward

pytestmark = pytest.mark.usefixtures("x64")


@dataclasses.dataclass(frozen=True)
class AtOneLabel(Estimator):
    """The gradients at one label, whatever the targets are."""

    label: int = 0
    name: ClassVar[str] = "at_one_label"

    def expectation(self, objective, outputs, batch, contribution):
        targets = jnp.full_like(batch.targets, self.label)
        return contribution(jax.grad(lambda y: objective.loss(y, targets, batch.mask)[0])(outputs))


def problem():
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(4, 3))), "t": jnp.asarray(rng.normal(size=3))}
    x, y = jnp.asarray(rng.normal(size=(5, 2, 4))), jnp.asarray(rng.integers(0, 3, (5, 2)))
    return Objective(lambda p, x: (x @ p["w"]) * jnp.exp(p["t"]), Categorical()), params, (x, y)


def test_a_fisher_type_from_outside():
    objective, params, (x, y) = problem()
    stats = value_grad_and_factors(objective, uncovered="diagonal")
    bases = eigendecompose(stats(params, (x, y)).factors)
    found = correct_eigenvalues(objective, bases, fisher=AtOneLabel(label=2))(params, (x, y))
    expected = correct_eigenvalues(objective, bases)(params, (x, jnp.full_like(y, 2)))
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-14),
        found.corrections,
        expected.corrections,
    )
    assert set(found.corrections.sums) == {"w", "t"}


def test_a_fisher_type_without_gradients_of_examples_is_refused():
    objective, params, batch = problem()
    stats = value_grad_and_factors(objective, uncovered="ignore")
    bases = eigendecompose(stats(params, batch).factors)
    with pytest.raises(ValueError, match="fisher='forward': expected one of 'empirical', 'mc'"):
        correct_eigenvalues(objective, bases, fisher=Forward())


def test_such_a_type_is_refused_under_its_parents_name():
    class AllAtOnce(Exact):
        of_examples: ClassVar[bool] = False

    objective, params, batch = problem()
    bases = eigendecompose(
        value_grad_and_factors(objective, uncovered="ignore")(params, batch).factors
    )
    with pytest.raises(ValueError, match="fisher='exact'.*AllAtOnce is not correct for"):
        correct_eigenvalues(objective, bases, fisher=AllAtOnce())
