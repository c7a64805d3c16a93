"""A Fisher type made outside the library is taken wherever a name is."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxkfac as jk
from jaxkfac.factors import FISHER_TYPES, Estimator
from jaxkfac.planning import plan_memory


@dataclasses.dataclass(frozen=True)
class AtOneLabel(Estimator):
    """The gradients at one label, whatever the targets are."""

    label: int = 2
    name: ClassVar[str] = "at_one_label"

    def expectation(self, objective, outputs, batch, contribution):
        targets = jax.tree.map(lambda y: jnp.full_like(y, self.label), batch.targets)
        return contribution(objective.scores(outputs, targets, batch.mask))


@dataclasses.dataclass(frozen=True)
class Restated(Estimator):
    """One of the library's own types, under a class of its own."""

    of: str = "exact"
    name: ClassVar[str] = "restated"
    samples_labels: ClassVar[bool] = True

    def expectation(self, objective, outputs, batch, contribution):
        own = FISHER_TYPES[self.of](self.samples, self.chunk, self.key, self.labels)
        return own.expectation(objective, outputs, batch, contribution)


def problem():
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(4, 3))), "b": jnp.asarray(rng.normal(size=3))}
    x, y = jnp.asarray(rng.normal(size=(5, 2, 4))), jnp.asarray(rng.integers(0, 3, (5, 2)))
    mask = jnp.asarray(rng.random((5, 2)) < 0.7)
    return jk.Objective(lambda p, x: x @ p["w"] + p["b"], jk.Categorical()), params, (x, y, mask)


def two_outputs():
    objective, params, (x, y, mask) = problem()
    both = jk.Objective(
        lambda p, x: {"class": x @ p["w"] + p["b"], "value": jnp.tanh(x[:, 0] @ p["w"])},
        {"class": jk.Categorical(), "value": jk.Gaussian()},
    )
    value, kept = jnp.sin(x[:, 0, :3]), jnp.array([True, True, False, True, True])
    return both, params, (x, {"class": y, "value": value}, {"class": mask, "value": kept})


def assert_close(found, expected):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-13), found, expected
    )


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("build", [problem, two_outputs])
@pytest.mark.parametrize("of", ["empirical", "exact", "mc"])
def test_an_operator_is_that_of_the_type_it_restates(x64, of, build):
    objective, params, batch = build()
    labels = jax.tree.map(lambda y: jnp.stack([y, y[::-1]]), batch[1])
    given = {"labels": labels} if of == "mc" else {}
    expected = jk.operators.fisher(objective, params, batch, fisher=of, **given)
    outside = Restated(of=of)
    for chunk in (None, 2):
        found = jk.operators.fisher(
            objective, params, batch, fisher=outside, labels=labels, chunk=chunk
        )
        assert_close(found.to_dense(), expected.to_dense())


@pytest.mark.exhaustive
def test_an_operator_draws_the_same_labels_whatever_the_chunk(x64):
    draws = Restated(of="mc", samples=2)
    whole, cut = (
        jk.operators.fisher(*problem(), fisher=draws, key=jax.random.key(0), chunk=chunk)
        for chunk in (None, 2)
    )
    assert_close(whole.to_dense(), cut.to_dense())


def test_an_operator_refuses_a_type_that_is_not_right_for_whole_examples():
    with pytest.raises(ValueError, match="fisher='forward': expected one of 'empirical', 'mc'"):
        jk.operators.fisher(*problem(), fisher=FISHER_TYPES["forward"]())


@pytest.mark.slow
def test_factors_host_eigenvalues_optimizer_and_plan_take_it(x64):
    """Each is that of the empirical type, with every target the label."""
    objective, params, (x, y, mask) = problem()
    targets = (x, jnp.full_like(y, 2), mask)
    updates = []
    for fisher, batch in (("empirical", targets), (AtOneLabel(), (x, y, mask))):
        stats = jk.value_grad_and_factors(objective, fisher=fisher)
        factors = stats(params, batch).factors
        with jk.HostCurvature(decay=0.9, refresh_every=1, lag=0) as service:
            service.push(factors, 0)
            bases = service.bases(0)
        corrected = jk.correct_eigenvalues(objective, bases, fisher=fisher)(params, batch)
        grads = jax.grad(objective)(params, (x, y, mask))
        natural = jk.natural_gradient(grads, corrected, damping=1e-3)
        tx = jk.kfac(0.1, like=stats.factor_shapes(params, batch), damping=1e-3)
        update, _ = tx.update(grads, tx.init(params), params, factors=factors)
        updates.append((factors.a_sums, factors.g_sums, corrected.corrections, natural, update))
    assert_close(updates[1], updates[0])


@pytest.mark.exhaustive
def test_a_plan_counts_its_backward_pass():
    objective, params, batch = problem()
    plans = [
        plan_memory(
            objective, params, batch, optimizer=optax.sgd(0.1), device_bytes="1MB", fisher=fisher
        )
        for fisher in ("empirical", "mc", AtOneLabel())
    ]
    empirical, sampled, outside = (plan.now.device for plan in plans)
    assert outside["factors"] == empirical["factors"] == sampled["factors"]
    assert outside["activations"] > empirical["activations"]
