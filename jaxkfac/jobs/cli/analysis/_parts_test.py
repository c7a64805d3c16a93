"""Groups of layers, and a block of a stack as a layer of its own."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxkfac as jk
from jaxkfac.jobs.cli.analysis._files import groups_of


def table(fn, params, *args):
    return list(jk.find_layers(fn, params, *args).values())


def stacked(params, x):
    def block(x, p):
        return jnp.tanh(x @ p["q"] + p["b"]) + x @ p["k"], None

    return jax.lax.scan(block, x, params["blocks"])[0] @ params["head"]


PARAMS = {
    "blocks": {"q": jnp.ones((3, 4, 4)), "b": jnp.ones((3, 4)), "k": jnp.ones((3, 4, 4))},
    "head": jnp.ones((4, 2)),
}


def test_layers_that_share_an_input_are_one_group_and_its_blocks_are_the_stack():
    groups = groups_of(table(stacked, PARAMS, jnp.ones((5, 4))))
    names = [sorted(layer.name for layer in group.layers) for group in groups]
    assert names == [["blocks/k", "blocks/q"], ["head"]]
    assert [group.blocks for group in groups] == [(0, 1, 2), (None,)]
    parts = [str(part) for part in groups[0].parts(1)]
    assert len(parts) == 3 and len(set(parts)) == 3  # one A, two G


def test_a_parameter_read_in_both_orientations_is_one_group():
    def tied(params, x):
        return x @ params["w"] @ params["w"].T

    (group,) = groups_of(table(tied, {"w": jnp.ones((3, 2))}, jnp.ones((5, 3))))
    assert len(group.layers) == 2 and group.blocks == (None,)


def test_a_block_reads_the_parameters_slice():
    (group, _) = groups_of(table(stacked, PARAMS, jnp.ones((5, 4))))
    leaf = jnp.arange(48.0).reshape(3, 4, 4)
    for layer in group.of_block(2):
        assert layer.name.endswith("[2]") and layer.stack == ()
        np.testing.assert_array_equal(layer.weight.read(leaf), leaf[2])
    biased = next(layer for layer in group.of_block(2) if layer.bias is not None)
    rows = jnp.arange(12.0).reshape(3, 4)
    np.testing.assert_array_equal(biased.bias.read(rows).reshape(-1), rows[2])
