"""What ends an answer."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxkfac.jobs.models.generation import is_finite


def test_one_nan_among_a_vocabulary_is_seen():
    """A maximum hands it on for few columns only; minus infinity forbids a token."""
    logits = np.zeros((5, 50_000), np.float32)
    logits[0, 25_000], logits[1, 7], logits[2, :10], logits[3] = np.nan, np.inf, -np.inf, -np.inf
    np.testing.assert_array_equal(
        jax.jit(is_finite)(jnp.asarray(logits)), [False, False, True, False, True]
    )
