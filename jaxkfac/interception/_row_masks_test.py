"""Masks reach the layers whose rows they speak of, or say that they cannot."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac._errors import LostRowsError
from jaxkfac.interception._row_masks import RowMask, mark_rows, row_weights
from jaxkfac.interception._trace import trace

MASK = jnp.arange(5) < jnp.asarray([[5], [3], [1]])
X = jnp.ones((3, 5, 4))
PARAMS = {"w": jnp.ones((4, 2)), "v": jnp.ones((4, 2)), "scale": jnp.ones(4)}


def weights_of(fn, *args, mask=None):
    """``{path: row weights}`` with ``mask`` over the leading axes of the output."""
    traced = trace(fn, PARAMS, *args)
    table = traced.analysis.table
    masks = (
        [] if mask is None else [RowMask(mask, traced.output_axes()[: mask.ndim], complete=True)]
    )
    marks = [m.axes for m in traced.analysis.plan.all_marks()]
    return {
        u.view.source.path: row_weights(table, u, masks, marks)
        for u in traced.analysis.plan.all_uses()
    }


def test_a_mask_of_the_outputs_reaches_the_first_layer():
    got = weights_of(lambda p, x: jnp.tanh(x @ p["w"]) @ p["v"][:2], X, mask=MASK)
    np.testing.assert_array_equal(got["w"], MASK)


def test_rows_merged_by_a_reshape_are_masked_in_order():
    got = weights_of(lambda p, x: (x.reshape(15, 4) @ p["w"]).reshape(3, 5, 2), X, mask=MASK)
    np.testing.assert_array_equal(got["w"], MASK.reshape(15))


def test_a_mask_follows_its_axes_through_a_transpose():
    got = weights_of(lambda p, x: (x.swapaxes(0, 1) @ p["w"]).swapaxes(0, 1), X, mask=MASK)
    np.testing.assert_array_equal(got["w"], MASK.T)


def test_a_pairwise_layer_needs_both_rows():
    def fn(p, x):
        pairs = x[:, :, None] - x[:, None]
        return (pairs @ p["w"]).sum(2)

    got = weights_of(fn, X, mask=MASK)["w"]
    np.testing.assert_array_equal(got, MASK[:, :, None] & MASK[:, None])


def test_a_layer_over_examples_alone_exists_where_any_position_does():
    def fn(p, x):
        return x + (x.sum(1) @ p["w"]).sum(-1)[:, None, None]

    got = weights_of(fn, X, mask=MASK & jnp.asarray([[True], [False], [True]]))["w"]
    np.testing.assert_array_equal(got, [True, False, True])


def replaced(x, token):
    return jnp.where(X > 0, token, x)


@pytest.mark.parametrize("meet", [jnp.multiply, jnp.add, jnp.subtract, replaced])
def test_the_elements_of_a_scale_or_bias_are_no_rows_to_lose(meet):
    got = weights_of(lambda p, x: meet(x, p["scale"]), X, mask=MASK)["scale"]
    np.testing.assert_array_equal(got[..., 0], MASK)


def test_nor_are_those_of_a_scale_whose_axes_cannot_be_followed():
    got = weights_of(lambda p, x: x * p["w"].T[::-1][0], X, mask=MASK)["w"]
    np.testing.assert_array_equal(got[..., 0], MASK)


def test_a_class_token_exists_whatever_the_mask_says():
    def fn(p, x):
        token = jnp.broadcast_to(p["scale"], (3, 1, 4))
        return jnp.concatenate([token, x[:, 1:]], 1)

    assert weights_of(fn, X, mask=MASK)["scale"] is None


def test_positions_cut_away_are_lost():
    with pytest.raises(LostRowsError, match=r"layer 'w': example axis lost at `dot_general`"):
        weights_of(lambda p, x: jnp.cumsum((x @ p["w"])[:, ::-1][:, :5], 1), X, mask=MASK)


def test_an_encoder_of_the_same_length_is_not_the_decoder():
    def fn(p, x, memory):
        return x @ p["w"] + jnp.tanh(memory @ p["v"]).mean(1, keepdims=True)

    with pytest.raises(LostRowsError, match="layer 'v'"):
        weights_of(fn, X, X, mask=MASK)


def test_no_mask_asks_for_no_rows():
    assert weights_of(lambda p, x: x @ p["w"], X)["w"] is None


def test_a_mark_after_the_layer_it_speaks_of_is_an_error():
    with pytest.raises(LostRowsError, match="only later"):
        weights_of(lambda p, x: mark_rows(x @ p["w"], MASK), X)


def test_a_mark_of_another_shape_is_an_error():
    with pytest.raises(ValueError, match=r"mask has shape \(5, 3\)"):
        mark_rows(X, MASK.T)


def test_a_mark_is_in_the_program_that_is_emitted_again():
    """Adapters are attached this way, and their curvature traces what comes out."""

    def fn(p, x):
        return mark_rows(x, MASK) @ p["w"]

    traced = trace(fn, PARAMS, X)
    again = lambda p, x: traced.run(lambda site, operands: site.bind(*operands), p, {}, x)
    found = trace(again, PARAMS, X).analysis.plan.all_marks()
    assert len(found) == len(traced.analysis.plan.all_marks()) == 1


def test_two_masks_of_one_value_are_an_error_but_not_one_behind_the_other():
    def apart(p, x, other):
        return mark_rows(x, MASK) @ p["w"] + mark_rows(jnp.tanh(x), other) @ p["v"]

    def inside(p, x, other):
        return mark_rows(x, MASK) @ p["w"] + jax.jit(apart)(p, x, other)

    def behind(p, x, other):
        return mark_rows(mark_rows(x, MASK) @ p["w"] @ jnp.ones((2, 4)), other) @ p["v"]

    for fn in (apart, inside):
        with pytest.raises(LostRowsError, match="different masks for the same axes"):
            trace(fn, PARAMS, X, ~MASK)
    for fn in (lambda p, x, other: apart(p, x, MASK), behind):
        assert len(trace(fn, PARAMS, X, ~MASK).table) == 2
