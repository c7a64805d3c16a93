"""What beams say of logits that are no numbers."""

import jax.numpy as jnp
import numpy as np

from jaxkfac.jobs.models.generation import beam_search

EXAMPLES, BEAMS, WORDS, STEPS = 3, 2, 5, 4


def test_logits_that_are_not_finite_are_seen_at_any_token_and_example_by_example():
    def step(ids, number, state):
        logits = jnp.tile(jnp.arange(WORDS, dtype=jnp.float32), (len(ids), 1))
        bad = (number == 2) & (jnp.arange(len(ids)) // BEAMS == 1)
        return jnp.where(bad[:, None], jnp.nan, logits), state

    ids, finite = beam_search(
        jnp.zeros((EXAMPLES * BEAMS, WORDS)),
        (),
        step,
        lambda state, rows: state,
        num_beams=BEAMS,
        steps=STEPS,
        ends=jnp.zeros((0,), jnp.int32),
        length_penalty=1.0,
        early_stopping=False,
    )
    assert ids.shape == (EXAMPLES, STEPS)
    np.testing.assert_array_equal(finite, [True, False, True])
