"""Loops that are followed once for all iterations."""

import jax
import jax.numpy as jnp
import pytest

from jaxkfac.interception._trace import trace
from jaxkfac.interception.coupling import _follow
from jaxkfac.interception.coupling._loops import MOST_ROUNDS


def delayed(w, x):
    """Each example's output is computed from the inputs of an earlier one, kept in a register."""

    def step(register, row):
        return jnp.concatenate([row[None], register[:-1]]), register[-1]

    _, rows = jax.lax.scan(step, jnp.zeros((MOST_ROUNDS + 5, 3)), x)
    return rows @ w


@pytest.mark.parametrize("question", ["value", "derivative"])
def test_labels_that_still_grow_after_the_last_round_prove_nothing(monkeypatch, question):
    monkeypatch.setattr(_follow, "MOST_UNROLLED", 0)
    traced = trace(delayed, jnp.ones((3, 2)), jnp.ones((50, 3)), num_outputs=1)
    traced.join_examples()
    assert traced.examples_meet(question).answer == "unknown"
