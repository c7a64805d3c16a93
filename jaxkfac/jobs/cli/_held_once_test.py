import jax
import jax.numpy as jnp
import pytest

from jaxkfac.jobs.cli._progress import HeldTwiceError, check_held_once

SHAPE = (3, 1 << 18)  # 3 MiB, and half of it in bfloat16: both are looked at


@pytest.fixture
def earlier(few_objects):
    return jax.live_arrays()


@pytest.fixture
def kernel(earlier):
    return jax.random.normal(jax.random.key(0), SHAPE)


@pytest.mark.slow
def test_a_copy_in_another_tree_is_named_with_its_bytes(earlier, kernel):
    trees = {"params": {"kernel": kernel}, "optimizer": {"first": kernel.astype(jnp.bfloat16)}}
    message = r"params/kernel = optimizer/first: 3 MiB too much"
    with pytest.raises(HeldTwiceError, match=message):
        check_held_once(earlier, **trees)


def test_a_copy_that_a_loader_has_kept_is_named(earlier, kernel):
    forgotten = kernel + 0
    with pytest.raises(HeldTwiceError, match=r"params/kernel = float32\[3, 262144\] on"):
        check_held_once(earlier, params={"kernel": kernel})
    del forgotten
    check_held_once(earlier, params={"kernel": kernel})


def test_what_was_there_before_is_not_the_runs_fault(kernel):
    own = kernel + 0
    check_held_once([x for x in jax.live_arrays() if x is not own], params={"kernel": own})


@pytest.mark.slow
def test_tied_weights_constants_and_an_optimizers_fresh_leaves_are_no_copies(earlier, kernel):
    params = {"embedding": kernel, "head": kernel, "scale": jnp.ones(SHAPE)}
    optimizer = {
        "mu": jnp.zeros(SHAPE),
        "nu": jnp.zeros(SHAPE),
        "bases": [jnp.eye(1024), jnp.eye(1024)],
    }
    check_held_once(earlier, params=params, optimizer=optimizer)
