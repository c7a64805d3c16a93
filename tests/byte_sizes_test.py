"""Every argument that asks for bytes takes a size as a person writes it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkfac as jk

PARAMS = {"up": {"kernel": jnp.eye(3, 4)}, "down": {"kernel": jnp.ones((4, 3))}}
BATCH = jnp.linspace(-1, 1, 18).reshape(6, 3), jnp.arange(6) % 3
OBJECTIVE = jk.Objective(
    lambda p, x: jnp.tanh(x @ p["up"]["kernel"]) @ p["down"]["kernel"], jk.Categorical()
)


@pytest.fixture(scope="module")
def bases():
    return jk.eigendecompose(jk.value_grad_and_factors(OBJECTIVE)(PARAMS, BATCH)[2])


def posterior(bases):
    return jk.laplace(OBJECTIVE, PARAMS, bases, num_examples=6, prior_precision=0.3)


def tuned(bases, **size):
    return posterior(bases).tune_prior(validation=BATCH, grid=(0.1, 1.0), **size).prior_precision


# {function: (its argument of bytes, a call of it)}
CALLS = {
    "value_grad_and_factors": (
        "max_factor_bytes",
        lambda bases, **size: jk.value_grad_and_factors(OBJECTIVE, **size)(PARAMS, BATCH)[2],
    ),
    "influence": (
        "max_bytes",
        lambda bases, **size: jk.influence(OBJECTIVE, PARAMS, bases, BATCH, BATCH, **size),
    ),
    "self_influence": (
        "max_bytes",
        lambda bases, **size: jk.self_influence(OBJECTIVE, PARAMS, bases, BATCH, **size),
    ),
    "gram": (
        "max_bytes",
        lambda bases, **size: jk.gram(OBJECTIVE, PARAMS, BATCH, **size),
    ),
    "prepare_queries": (
        "max_bytes",
        lambda bases, **size: jk.prepare_queries(OBJECTIVE, PARAMS, bases, BATCH, **size).errors,
    ),
    "variance": (
        "max_bytes",
        lambda bases, **size: posterior(bases).variance(BATCH[0], **size),
    ),
    "predict": (
        "max_bytes",
        lambda bases, **size: posterior(bases).predict(BATCH[0], **size),
    ),
    "tune_prior": ("max_bytes", tuned),
}


@pytest.mark.default(1, slow=0)
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CALLS)
def test_a_size_in_words_is_that_number_of_bytes(bases, name):
    argument, call = CALLS[name]
    found, expected = (call(bases, **{argument: size}) for size in ("1 MiB", 2**20))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    for wrong in ("12 parsecs", 0):
        with pytest.raises(ValueError, match=f"{argument}=.*: expected a positive number of bytes"):
            call(bases, **{argument: wrong})
