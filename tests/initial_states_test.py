"""A learned initial state is a lone bias: set beside data once, before the first iteration."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxkfac as jk
from tests._checks import assert_reported, check, objective_of
from tests._programs import labels, normal, tree
from tests._taps import PLAIN


def params():
    return tree(0, w=(3, 4), u=(4, 4), start=(4,), head=(4, 3))


def batch():
    return normal(1, 5, 2, 3), labels(2, 5)


def unrolled(p, x, tap):
    h = jnp.broadcast_to(p["start"], (x.shape[0], 4))
    h = tap.lone_bias("start", h, shape=(4,))
    for t in range(x.shape[1]):
        y = tap.dense("w", x[:, t], x[:, t] @ p["w"])
        h = jnp.tanh(y + tap.dense("u", h, h @ p["u"]))
    return tap.dense("head", h, h @ p["head"])


def step_of(p):
    return lambda h, x: (jnp.tanh(x @ p["w"] + h @ p["u"]), None)


def looped(p, x, tap):
    h = jnp.broadcast_to(p["start"], (x.shape[0], 4))
    return lax.scan(step_of(p), h, x.swapaxes(0, 1))[0] @ p["head"]


def rematerialised(p, x, tap):
    h = jnp.broadcast_to(p["start"], (x.shape[0], 4))
    return lax.scan(jax.checkpoint(step_of(p)), h, x.swapaxes(0, 1))[0] @ p["head"]


def one_by_one(p, x, tap):
    return jax.vmap(lambda x: lax.scan(step_of(p), p["start"], x)[0])(x) @ p["head"]


def twice_as_large(p, x, tap):
    half = {**p, "start": p["start"] / 2}
    return jax.jit(lambda p, x: looped({**p, "start": 2 * p["start"]}, x, PLAIN))(half, x)


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("model", [looped, rematerialised, one_by_one, twice_as_large])
@pytest.mark.parametrize("scales", ["diagonal", "full_block"])
def test_its_diagonal_is_that_of_each_examples_start(x64, model, scales):
    check(model, params(), batch(), oracle_model=unrolled, scales=scales)


@pytest.mark.slow
def test_rows_that_do_not_exist_are_left_out(x64):
    stats = jax.jit(jk.value_grad_and_factors(objective_of(looped)))
    here = jnp.array([True, True, False, True, False])
    whole, kept, rest = (
        stats(params(), batch(), positions=rows).factors["start"].diagonal
        for rows in (jnp.ones(5, bool), here, ~here)
    )
    np.testing.assert_allclose(kept + rest, whole, rtol=1e-12)
    assert float(kept.min()) > 0 and float(rest.min()) > 0


def test_a_state_without_examples_is_no_bias(x64):
    """One accumulator for the whole batch, which the loop modifies."""

    def model(p, x):
        total, _ = lax.scan(lambda c, r: (c + jnp.tanh(r).sum(0), None), p["start"],
                            x @ p["w"])  # fmt: skip
        return x[:, 0] @ p["w"] + total

    assert_reported(model, params(), (batch()[0],), "start", "carried through `scan`")
