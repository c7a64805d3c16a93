"""Which layers are found, what they are called, and what they share."""

import re

import jax
import jax.numpy as jnp
import pytest

from jaxkfac._errors import UnknownLayerError
from jaxkfac.interception._trace import find_layers, trace


def weights(**shapes):
    return {name: jnp.ones(shape) for name, shape in shapes.items()}


def test_either_operand_order_is_the_same_layer():
    x = jnp.ones((5, 3))
    right = find_layers(lambda p, x: x @ p["w"], weights(w=(3, 2)), x)["w"]
    left = find_layers(lambda p, x: p["w"].T @ x.T, weights(w=(3, 2)), x)["w"]
    assert (right.in_features, right.out_features) == (3, 2)
    assert (left.in_features, left.out_features) == (3, 2)


@pytest.mark.parametrize("shape", [(3, 2), (3, 1), (1, 3)])
def test_a_kernel_read_both_ways_has_the_same_names_in_either_order(shape):
    def model(p, x, y, order):
        read = {"straight": lambda: (x @ p["w"]).sum(), "transposed": lambda: (y @ p["w"].T).sum()}
        return sum(read[how]() for how in order)

    orders = [("straight", "transposed"), ("transposed", "straight")]
    data = [jnp.ones((5, side)) for side in shape]
    for order in orders:
        table = find_layers(lambda p, *data: model(p, *data, order), weights(w=shape), *data)  # noqa: B023
        layers = {name: (table[name].in_features, table[name].out_features) for name in table}
        assert layers == {"w": shape, "w@transposed": shape[::-1]}


def test_features_keep_the_parameters_own_axis_order():
    def model(p, x):
        return jnp.einsum("nhk,kho->no", x, p["w"])

    layer = find_layers(model, weights(w=(4, 3, 2)), jnp.ones((5, 3, 4)))["w"]
    assert layer.weight.inputs == (0, 1)
    assert layer.weight.outputs == (2,)
    assert layer.in_features == 12


def test_inputs_are_shared_through_casts_jit_and_remat():
    def model(p, x):
        q = x.astype(jnp.bfloat16) @ p["q"].astype(jnp.bfloat16)
        k = jax.jit(lambda x, w: x.astype(jnp.bfloat16) @ w)(x, p["k"].astype(jnp.bfloat16))
        v = jax.checkpoint(lambda x, w: x.astype(jnp.bfloat16) @ w)(x, p["v"].astype(jnp.bfloat16))
        return q + k + v + (jnp.sin(x) @ p["o"]).astype(jnp.bfloat16)

    shape = (3, 2)
    table = find_layers(model, weights(q=shape, k=shape, v=shape, o=shape), jnp.ones((5, 3)))
    assert [table[n].shares_input_with for n in "qkvo"] == [None, "q", "q", None]


def test_a_scan_constant_does_not_share_with_the_layer_outside():
    """Inside, the same input counts once per iteration."""

    def model(p, x):
        total, _ = jax.lax.scan(
            lambda c, _: (c + x @ p["inner"], None), jnp.zeros((5, 2)), None, length=3
        )
        return total + x @ p["outer"]

    table = find_layers(model, weights(inner=(3, 2), outer=(3, 2)), jnp.ones((5, 3)))
    assert table["outer"].shares_input_with is None
    assert table["inner"].shares_input_with is None


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
def test_a_bias_joins_the_product_that_only_it_reads(wrap):
    def model(p, x):
        return wrap(lambda x, w: x @ w)(x, p["w"]) + p["b"]

    assert find_layers(model, weights(w=(3, 2), b=(2,)), jnp.ones((5, 3)))["w"].bias.path == "b"


def test_a_bias_is_alone_where_the_product_has_another_reader():
    def model(p, x):
        y = x @ p["w"]
        return (y + p["b"]) * y

    table = find_layers(model, weights(w=(3, 2), b=(2,)), jnp.ones((5, 3)))
    assert table["w"].bias is None
    assert table["b"].kind == "bias"


def test_a_bias_of_two_products_is_alone():
    def model(p, x):
        return jnp.tanh(x @ p["w"] + p["b"]) @ p["v"] + p["b"]

    table = find_layers(model, weights(w=(3, 2), v=(2, 2), b=(2,)), jnp.ones((5, 3)))
    assert table["b"].uses == 2
    assert table["w"].bias is None


def test_a_bias_over_heads_joins_in_the_kernels_order():
    def model(p, x):
        return jnp.einsum("nd,dhk->nhk", x, p["w"]) + p["b"]

    layer = find_layers(model, weights(w=(4, 3, 2), b=(3, 2)), jnp.ones((5, 4)))["w"]
    assert layer.bias.path == "b"
    assert layer.bias.out_features == layer.out_features == 6


def test_a_table_of_positions_is_no_bias_of_the_product():
    def model(p, x):
        return x @ p["w"] + p["positions"]

    table = find_layers(model, weights(w=(3, 2), positions=(4, 2)), jnp.ones((5, 4, 3)))
    assert table["w"].bias is None
    assert table["positions"].kind == "bias"


def test_indexed_slices_are_named_by_their_index():
    def model(p, x):
        return jnp.tanh(x @ p["w"][0]) @ p["w"][1]

    table = find_layers(model, weights(w=(2, 3, 3)), jnp.ones((5, 3)))
    assert list(table) == ["w[0]", "w[1]"]
    assert table.num_covered == 18


def test_shared_axes_are_a_stack_and_free_axes_are_one_on_request():
    def model(p, x):
        h = jnp.einsum("bti,eio->ebto", x, p["up"])
        return jnp.einsum("ebto,eoi->bti", jnp.tanh(h), p["down"])

    p, x = weights(up=(4, 3, 5), down=(4, 5, 3)), jnp.ones((2, 6, 3))
    table = find_layers(model, p, x)
    assert (table["up"].stack, table["up"].out_features) == ((), 20)
    table = find_layers(model, p, x, experts="up")
    assert (table["up"].stack, table["up"].out_features) == ((4,), 5)

    def routed(p, x):
        return jnp.einsum("ebi,eio->ebo", x, p["up"])

    assert find_layers(routed, p, jnp.ones((4, 2, 3)))["up"].stack == (4,)


def test_a_tie_in_opposite_orientations_keeps_both_blocks():
    def model(p, ids):
        return jnp.tanh(p["e"][ids]) @ p["e"].T

    table = find_layers(model, weights(e=(7, 3)), jnp.ones((2, 4), int))
    assert (table["e"].kind, table["e"].in_features) == ("dense", 3)
    assert (table["e@embedding"].kind, table["e@embedding"].in_features) == ("embedding", 7)
    assert any("has 2 blocks" in note for _, note in table.notes)


def test_kernels_looked_up_row_by_row_are_a_table_and_remarked_on():
    def model(p, x):
        return (x[:, :, None] * jnp.tanh(p["experts"][x.argmax(-1)])).sum(1)

    table = find_layers(model, weights(experts=(3, 4, 5)), jnp.ones((7, 4)))
    assert table["experts"].out_features == 20
    assert any("each row of it 4x5" in note for _, note in table.notes)


def test_a_batch_statistic_is_a_constant_of_the_rows_it_meets_later():
    def model(p, x):
        return (x - x.mean(0)) * (jax.lax.rsqrt(x.var(0) + 1) * p["scale"])

    table = find_layers(model, weights(scale=(3,)), jnp.ones((5, 3)))
    assert not table.uncovered
    assert (table["scale"].kind, table["scale"].uses) == ("scale", 1)


def test_a_product_of_a_batch_statistic_has_lost_its_examples():
    def model(p, x):
        return jnp.tanh(x + x.mean(0) @ p["w"])

    ((path, reason),) = find_layers(model, weights(w=(3, 3)), jnp.ones((5, 3))).uncovered
    assert (path, reason) == ("w", "has the example axis lost at `dot_general`")


@pytest.mark.parametrize("shape", [(3,), (1, 3)])
def test_an_input_common_to_all_examples_hides_no_lost_use(shape):
    """Its leading axis of size one is no sign of a single example."""

    def model(p, x, shift):
        return x + shift + x.mean(0) @ p["w"]

    params, x, shift = weights(w=(3, 3)), jnp.ones((5, 3)), jnp.ones(shape)
    ((_, reason),) = trace(model, params, x, shift, num_outputs=1).table.uncovered
    assert reason == "has the example axis lost at `dot_general`"


@pytest.mark.parametrize("meet", [jnp.add, jnp.subtract])
def test_a_bias_of_a_batch_statistic_is_used_where_rows_are(meet):
    """At the statistic itself its gradient is a sum over examples."""
    table = find_layers(lambda p, x: x * meet(x.mean(0), p["b"]), weights(b=(3,)), jnp.ones((5, 3)))
    assert table["b"].kind == "scale"


def test_a_single_example_has_nothing_to_lose():
    def model(p, x):
        return x @ p["w"] * p["scale"]

    assert not find_layers(model, weights(w=(3, 2), scale=(2,)), jnp.ones((1, 3))).uncovered


def test_large_sides_are_marked_as_diagonals():
    table = find_layers(
        lambda p, x: x @ p["w"] + p["b"],
        weights(w=(8, 2), b=(2,)),
        jnp.ones((5, 8)),
        max_dense=8,
    )
    assert not table["w"].a_dense, "the ones column makes it 9"
    assert table["w"].g_dense
    assert "~8" in str(table)


def test_a_pattern_without_match_gives_the_nearest_names():
    with pytest.raises(UnknownLayerError, match="'dense/kernel'"):
        find_layers(
            lambda p, x: x @ p["dense"]["kernel"],
            {"dense": weights(kernel=(3, 2))},
            jnp.ones((5, 3)),
            layers="dense/kernal",
        )


def test_unread_parameters_are_listed_and_raise_nothing():
    table = find_layers(lambda p, x: x @ p["w"], weights(w=(3, 2), spare=(4,)), jnp.ones((5, 3)))
    assert table.uncovered == [("spare", "is not read by the function")]
    table.raise_uncovered()


# ------------------------------------------------------------------ convolutions

NHC = ("NHC", "HIO", "NHC")


def convolve(x, k, groups=1, **options):
    return jax.lax.conv_general_dilated(
        x, k, (1,), "SAME", dimension_numbers=NHC, feature_group_count=groups, **options
    )


def test_feature_groups_are_a_stack():
    def model(p, x):
        return convolve(x, p["k"], 2) + p["b"]

    layer = find_layers(model, weights(k=(3, 2, 6), b=(6,)), jnp.ones((5, 7, 4)))["k"]
    assert (layer.stack, layer.in_features, layer.out_features) == ((2,), 6, 3)
    assert (layer.bias.path, layer.bias.stack_shape, layer.bias.out_features) == ("b", (2,), 3)
    kernel = jnp.arange(36.0).reshape(3, 2, 6)
    blocks = layer.weight.read(kernel)
    assert (blocks[1] == kernel[..., 3:].reshape(6, 3)).all()
    assert (layer.bias.read(jnp.arange(6.0))[:, 0] == jnp.arange(6.0).reshape(2, 3)).all()


def test_a_depthwise_convolution_has_one_block_for_each_channel():
    def model(p, x):
        return convolve(x, p["k"], 4)

    layer = find_layers(model, weights(k=(3, 1, 4)), jnp.ones((5, 7, 4)))["k"]
    assert (layer.stack, layer.in_features, layer.out_features) == ((4,), 3, 1)


def test_groups_of_scanned_convolutions_are_stacked_within_the_scan():
    def model(p, x):
        def block(x, layer):
            return jnp.tanh(convolve(x, layer["k"], 2) + layer["b"]), None

        return jax.lax.scan(block, x, p)[0]

    layer = find_layers(model, weights(k=(5, 3, 2, 4), b=(5, 4)), jnp.ones((2, 7, 4)))["k"]
    assert (layer.stack, layer.bias.stack_shape) == ((5, 2), (5, 2))


def test_kernels_under_vmap_are_groups():
    """An ensemble: the members stack, each with the groups of its own convolution."""

    def model(p, x):
        return jax.vmap(lambda x, k: convolve(x, k, 2), in_axes=1, out_axes=1)(x, p["k"])

    layer = find_layers(model, weights(k=(3, 5, 2, 6)), jnp.ones((4, 5, 7, 4)))["k"]
    assert (layer.stack, layer.in_features, layer.out_features) == ((5, 2), 6, 3)


def test_convolutions_share_an_input_where_they_cut_it_the_same_way():
    def model(p, x):
        y = convolve(x, p["one"]) + convolve(x, p["same"])
        y += convolve(x, p["dilated"], rhs_dilation=(2,))
        y += jax.lax.conv_general_dilated(
            x, p["reversed"][::-1], (1,), "SAME", dimension_numbers=NHC
        )
        return jnp.concatenate([y, convolve(x, p["grouped"], 2)], -1)

    shape = (3, 4, 6)
    shapes = dict.fromkeys(("one", "same", "dilated", "reversed"), shape) | {"grouped": (3, 2, 6)}
    table = find_layers(model, weights(**shapes), jnp.ones((5, 7, 4)))
    owners = {name: table[name].shares_input_with for name in shapes}
    assert owners == {**dict.fromkeys(shapes), "same": "one"}


def test_a_kernel_may_be_read_back_to_front():
    """``lax.conv_transpose`` of a forward kernel: spatial axes reversed, channels swapped."""

    def model(p, x):
        return jax.lax.conv_transpose(
            x, p["k"], (2,), "SAME", dimension_numbers=NHC, transpose_kernel=True
        )

    layer = find_layers(model, weights(k=(3, 2, 4)), jnp.ones((5, 7, 4)))["k"]
    assert (layer.kind, layer.weight.inputs, layer.weight.outputs) == ("conv", (0, 2), (1,))


@pytest.mark.parametrize(
    "fn, shape",
    [
        (lambda x, k: x @ k[::-1], (4, 2)),
        (lambda x, k: x @ k[::-1][0], (2, 4, 2)),
        (lambda x, k: x @ jnp.tanh(k), (4, 2)),
        (lambda x, k: x @ k[jnp.asarray([0, 0, 1, 2])], (3, 2)),
        (lambda x, k: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, k[::-1])[0], (3, 4, 4)),
    ],
)
def test_a_parameter_that_is_no_matrix_has_a_diagonal_in_a_product(fn, shape):
    table = find_layers(lambda p, x: fn(x, p["k"]), weights(k=shape), jnp.ones((5, 4)))
    assert (table["k"].kind, table["k"].is_diagonal, table.uncovered) == ("transformed", True, [])


@pytest.mark.parametrize(
    "fn, shape, kind",
    [
        (lambda x, k: convolve(x, k[..., ::-1]), (3, 4, 2), "conv"),
        (lambda x, k: convolve(x, k[:, ::-1]), (3, 4, 2), "conv"),
        (lambda x, k: convolve(x, k[::-1][0]), (2, 3, 4, 2), "conv"),
        (lambda x, k: k[::-1][x.argmax(-1)], (9, 2), "embedding"),
    ],
)
def test_a_kernel_that_is_no_matrix_of_its_parameter_is_a_layer_of_its_own(fn, shape, kind):
    def model(p, x):
        return fn(x, p["k"])

    table = find_layers(model, weights(k=shape), jnp.ones((5, 7, 4)))
    assert not table.uncovered and list(table) == ["k@effective", "k"]
    assert table["k@effective"].kind == kind and table["k"].kind == "reparameterised"


@pytest.mark.parametrize(
    "fn, shape, reason",
    [
        (lambda x, k: convolve(k, jnp.ones((3, 4, 2)) * x.sum()), (5, 7, 4), "is the signal"),
        (
            lambda x, k: convolve(x[:4], k, batch_group_count=2),
            (3, 4, 2),
            "whose examples are grouped",
        ),
    ],
)
def test_a_parameter_where_no_rule_reads_one_is_reported(fn, shape, reason):
    def model(p, x):
        return fn(x, p["k"])

    found = find_layers(model, weights(k=shape), jnp.ones((5, 7, 4))).uncovered
    assert [path for path, _ in found] == ["k"]
    assert re.search(reason, found[0][1]), found


@pytest.mark.parametrize("fn", [lambda x, k: x @ k[::-1], lambda x, k: x @ k[:, ::-1]])
def test_a_matrix_that_is_back_to_front_is_no_dense_layer(fn):
    table = find_layers(lambda p, x: fn(x, p["k"]), weights(k=(4, 2)), jnp.ones((5, 4)))
    assert "dense" not in [layer.kind for layer in table.layers]


def test_a_parameter_reversed_twice_is_as_it_was():
    table = find_layers(lambda p, x: x @ p["k"][::-1][::-1], weights(k=(4, 2)), jnp.ones((5, 4)))
    assert table["k"].kind == "dense"


def test_a_reversed_bias_is_alone():
    def model(p, x):
        return x @ p["w"] + p["b"][::-1]

    table = find_layers(model, weights(w=(3, 2), b=(2,)), jnp.ones((5, 3)))
    assert (table["w"].bias, table["b"].kind) == (None, "bias")
