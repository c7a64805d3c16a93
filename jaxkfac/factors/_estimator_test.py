"""A Fisher type made outside the library: factors, second pass, budget and EKFAC."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac.factors import Categorical, Estimator, Objective, value_grad_and_factors

pytestmark = pytest.mark.usefixtures("x64")


@dataclasses.dataclass(frozen=True)
class AtOneLabel(Estimator):
    """The gradients at one label, whatever the targets are."""

    label: int = 0
    name: ClassVar[str] = "at_one_label"

    def expectation(self, objective, outputs, batch, contribution):
        targets = jnp.full_like(batch.targets, self.label)
        return contribution(jax.grad(lambda y: objective.loss(y, targets, batch.mask)[0])(outputs))


def assert_close(x, y):
    np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-14)


def problem():
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(4, 3))), "t": jnp.asarray(rng.normal(size=3))}
    x, y = jnp.asarray(rng.normal(size=(5, 2, 4))), jnp.asarray(rng.integers(0, 3, (5, 2)))

    def model(p, x):
        return (x @ p["w"]) * jnp.exp(p["t"])

    return Objective(model, Categorical()), params, (x, y)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("budget", [None, 1000])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_a_type_from_outside_gives_the_empirical_factors_of_its_labels(sharing, budget):
    objective, params, (x, y) = problem()
    options = {"uncovered": "diagonal", "sharing": sharing}
    there = value_grad_and_factors(objective, **options)(params, (x, jnp.full_like(y, 2)))
    options["max_factor_bytes"] = budget
    found = value_grad_and_factors(objective, fisher=AtOneLabel(label=2), **options)
    value, grads, factors = found(params, (x, y))
    plain = jax.value_and_grad(objective)(params, (x, y))
    for mine, other in ((factors["w"], there.factors["w"]), (factors["t"], there.factors["t"])):
        jax.tree.map(assert_close, mine, other)
    jax.tree.map(assert_close, (value, grads), plain)


def test_a_type_that_draws_no_labels_refuses_them():
    objective, params, batch = problem()
    stats = value_grad_and_factors(objective, fisher=AtOneLabel(), uncovered="ignore")
    with pytest.raises(ValueError, match="this is fisher='at_one_label'"):
        stats(params, batch, labels=batch[1][None])


def test_a_scalar_loss_refuses_a_type_that_needs_outputs():
    with pytest.raises(ValueError, match='fisher="at_one_label" needs the model'):
        value_grad_and_factors(lambda p, b: jnp.sum(p * b), fisher=AtOneLabel(), loss_terms=1)


def test_an_estimator_is_a_tree_of_its_key_and_labels():
    found = dataclasses.replace(AtOneLabel(samples=2, label=1), labels=jnp.arange(3))
    leaves, structure = jax.tree.flatten(found)
    assert len(leaves) == 1
    again = jax.tree.unflatten(structure, leaves)
    assert (again.label, again.samples, again.key) == (1, 2, None)


@pytest.mark.parametrize("option", ["samples", "chunk"])
def test_an_estimator_has_its_own_samples_and_chunk(option):
    with pytest.raises(ValueError, match=f"{option}=3.* give them to AtOneLabel itself"):
        value_grad_and_factors(problem()[0], fisher=AtOneLabel(), **{option: 3})


def test_a_field_without_a_hash_is_named():
    objective, *_ = problem()
    with pytest.raises(TypeError, match=r"AtOneLabel.label is a list, which has no hash.*a tuple"):
        value_grad_and_factors(objective, fisher=AtOneLabel(label=[1]))
