"""Influence on real data: wrong labels are found."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxkfac as jk
from jaxkfac.data import load_digits


def perceptron(p, x):
    return jnp.tanh(x @ p["w"] + p["b"]) @ p["u"] + p["c"]


def initial(sizes, seed=0):
    draw = np.random.default_rng(seed)
    (n, hidden, out) = sizes
    weights = {"w": draw.normal(size=(n, hidden)) / n**0.5, "b": np.zeros(hidden)}
    weights |= {"u": draw.normal(size=(hidden, out)) / hidden**0.5, "c": np.zeros(out)}
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), weights)


OBJECTIVE = jk.Objective(perceptron, jk.Categorical())


def trained(params, batch, weights, steps, rate=0.01, decay=1e-3):
    """Full-batch Adam on the weighted mean loss and a square of the parameters."""

    def loss(params):
        logits = perceptron(params, batch[0])
        each = optax.softmax_cross_entropy_with_integer_labels(logits, batch[1])
        penalty = sum(jnp.square(x).sum() for x in jax.tree.leaves(params))
        return (each * weights).sum() / weights.sum() + decay / 2 * penalty

    tx = optax.adam(rate)

    def step(carry, _):
        params, state = carry
        updates, state = tx.update(jax.grad(loss)(params), state)
        return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(step, (params, tx.init(params)), None, steps)[0][0]


def bases_of(params, batch):
    factors = jax.jit(jk.value_grad_and_factors(OBJECTIVE, fisher="mc"))
    bases = jk.eigendecompose(factors(params, batch, jax.random.key(0))[2])
    corrected = jk.correct_eigenvalues(OBJECTIVE, bases, fisher="mc")
    return jax.jit(corrected)(params, batch, jax.random.key(1))


@pytest.mark.slow
@pytest.mark.standard_promotion  # optax.adam needs it
def test_labels_that_were_flipped_have_the_largest_self_influence():
    """Four in five of them among a fifth of the digits."""
    digits = load_digits()
    inputs = jnp.asarray(digits.images, jnp.float32).reshape(len(digits.labels), -1)
    inputs = inputs / inputs.max()
    draw, labels = np.random.default_rng(0), np.array(digits.labels)
    flipped = draw.permutation(len(labels))[: len(labels) // 10]
    labels[flipped] = (labels[flipped] + draw.integers(1, 10, len(flipped))) % 10
    batch = inputs, jnp.asarray(labels)
    fit = jax.jit(trained, static_argnums=3)
    params = fit(initial((inputs.shape[1], 32, 10)), batch, jnp.ones(len(labels)), 200)
    own = jk.self_influence(OBJECTIVE, params, bases_of(params, batch), batch)
    first = np.argsort(-np.asarray(own))[: len(labels) // 5]
    assert np.isin(flipped, first).mean() >= 0.8
