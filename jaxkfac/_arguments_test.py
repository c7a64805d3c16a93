"""What counts as a tree of arrays, in checks of arguments and in annotations."""

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from jaxkfac._arguments import ArrayTree, check_arrays, partition

SHAPE = jax.ShapeDtypeStruct((2,), jnp.float32)


@pytest.mark.parametrize("leaf", [np.ones(2), SHAPE, np.float32(1), 1.5, True, None])
def test_arrays_their_shapes_and_numbers_are_leaves(leaf):
    tree = {"a": [leaf, jnp.ones(2), jax.random.key(0)]}
    assert isinstance(tree, ArrayTree)
    check_arrays("tree", tree)


@pytest.mark.parametrize("leaf", ["text", jnp.tanh, object()])
def test_other_leaves_are_refused(leaf):
    tree = {"a": [jnp.ones(2), leaf]}
    assert not isinstance(tree, ArrayTree)
    with pytest.raises(TypeError, match="tree: expected a tree of arrays"):
        check_arrays("tree", tree)


def test_an_annotation_checks_the_leaves_in_the_tests():
    assert partition({"w": SHAPE}) == ({"w": SHAPE}, {})
    with pytest.raises(jaxtyping.TypeCheckError, match="tree"):
        partition({"w": "text"})
