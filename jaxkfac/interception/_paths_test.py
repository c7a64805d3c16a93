import jax
import jax.numpy as jnp
import numpy as np

from jaxkfac._arguments import partition, with_leaves

TREE = {
    "kernel": jnp.ones((2, 2)),
    "half": jnp.ones(2, jnp.bfloat16),
    "ids": jnp.arange(3),
    "flag": np.array(True),
    "key": jax.random.key(0),
    "zero": np.zeros(2, jax.dtypes.float0),
    "list": [jnp.ones(1), 3],
}


def test_what_has_a_gradient_is_parted_from_the_rest():
    free, rest = partition(TREE)
    assert set(free) == {"kernel", "half", "list/0"}
    assert set(rest) == {"ids", "flag", "key", "zero", "list/1"}


def test_parts_put_together_are_the_tree():
    free, rest = partition(TREE)
    whole = with_leaves(jax.tree.map(lambda _: object(), TREE), free | rest)
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(TREE), strict=True):
        assert one is other
