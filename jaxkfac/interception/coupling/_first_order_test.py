"""Operands that a rule might overlook."""

import jax.numpy as jnp
from jax import lax

from jaxkfac.interception._trace import trace


def test_the_initial_value_of_a_window_enters_every_result():
    """Each output depends on the first example's value, although no window reaches it."""

    def model(w, x):
        windows = lax.reduce_window(x, x[0, 0], lax.add, (1, 2), (1, 1), ((0, 0), (0, 1)))
        return windows @ w

    x, w = jnp.arange(12.0).reshape(4, 3), jnp.ones((3, 2))
    assert (model(w, x.at[0, 0].set(1.0)) != model(w, x)).all()
    traced = trace(model, w, x, num_outputs=1)
    traced.join_examples()
    assert traced.examples_meet("value").answer == "yes"
