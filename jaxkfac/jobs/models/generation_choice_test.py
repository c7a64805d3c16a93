"""Drawn tokens have the probabilities that are left after the cuts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac.jobs.models.generation import TokenChoice, choose

PROBABILITIES = np.asarray([0.4, 0.3, 0.2, 0.1])
DRAWS = 4000


def frequencies(choice, temperature=1.0):
    rows = jnp.broadcast_to(jnp.log(jnp.asarray(PROBABILITIES, jnp.float32)), (DRAWS, 4))
    ids = choose(choice, rows, jnp.asarray(temperature, jnp.float32), jax.random.key(0))
    return np.bincount(ids, minlength=4) / DRAWS


@pytest.mark.default(4)
@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({}, [0.4, 0.3, 0.2, 0.1]),
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_k": 9}, [0.4, 0.3, 0.2, 0.1]),
        ({"top_p": 0.65}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 0.01}, [1, 0, 0, 0]),
        ({"top_p": 1.0}, [0.4, 0.3, 0.2, 0.1]),
        ({"top_k": 3, "top_p": 0.5}, [4 / 7, 3 / 7, 0, 0]),  # of what top_k leaves
    ],
)
def test_tokens_are_drawn_among_those_that_are_left(options, left):
    found = frequencies(TokenChoice(False, **options))
    np.testing.assert_allclose(found, left, atol=4 * 0.5 / DRAWS**0.5)
    assert not found[np.asarray(left) == 0].any()


def test_temperature_sharpens_before_the_cuts():
    sharp = PROBABILITIES**2 / (PROBABILITIES**2).sum()  # 0.53, 0.3, 0.13, 0.03
    np.testing.assert_allclose(
        frequencies(TokenChoice(False), 0.5), sharp, atol=4 * 0.5 / DRAWS**0.5
    )
    assert frequencies(TokenChoice(False, top_p=0.5), 0.5)[0] == 1


def test_a_choice_that_cannot_be_made_is_refused():
    for options, message in (
        ({"top_k": 0}, "top_k=0: expected at least 1"),
        ({"top_p": 0.0}, "top_p=0.0: expected more than 0"),
        ({"top_p": float("nan")}, "top_p=nan"),
    ):
        with pytest.raises(ValueError, match=message):
            TokenChoice(False, **options)
    with pytest.raises(ValueError, match="give a temperature and a key"):
        TokenChoice(True, top_k=3)
