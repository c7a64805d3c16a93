"""Where scattered rows of examples end, by the mode for indices out of bounds."""

import jax.numpy as jnp
import pytest

from jaxkfac.interception._trace import trace


@pytest.mark.parametrize(("mode", "answer"), [("clip", "yes"), ("drop", "no")])
def test_an_index_out_of_bounds_moves_a_row_only_if_it_is_clipped(mode, answer):
    """Clipped to the last row, the first example's input becomes the last example's output."""

    def model(w, x):
        rows = jnp.zeros_like(x).at[jnp.array([5, 1, 2])].set(x[:3], mode=mode)
        return rows @ w

    x, w = jnp.arange(12.0).reshape(4, 3), jnp.ones((3, 2))
    assert (model(w, x)[3] != 0).all() == (mode == "clip")
    traced = trace(model, w, x, num_outputs=1)
    traced.join_examples()
    assert traced.examples_meet("value").answer == answer
