"""The library's factors equal the brute-force ones, in float64 to 1e-10."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxkfac as jk
from tests._checks import (
    LIKELIHOODS,
    assert_block_close,
    assert_factors_close,
    assert_tree_close,
    check,
    objective_of,
)
from tests._dense import root_fisher
from tests._likelihoods import mean_loss
from tests._oracle import oracle
from tests._programs import (
    attention,
    attention_params,
    labels,
    mlp,
    mlp_params,
    normal,
    recurrent,
    recurrent_unrolled,
    rms,
    scanned,
    scanned_params,
    tree,
    unrolled,
)
from tests._taps import PLAIN, patches

# --------------------------------------------------------------- basic shapes


@pytest.mark.slow
def test_mlp(x64):
    check(mlp, mlp_params(), (normal(1, 6, 4), labels(2, 6)))


@pytest.mark.slow
def test_one_row(x64):
    check(mlp, mlp_params(), (normal(1, 1, 4), labels(2, 1)))


@pytest.mark.slow
def test_rows_with_positions(x64):
    check(mlp, mlp_params(), (normal(1, 3, 5, 4), labels(2, 3, 5)))


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("likelihood", ["bernoulli", "gaussian"])
@pytest.mark.parametrize("terms", [(), (3,)])
def test_other_likelihoods(x64, likelihood, terms):
    y = normal(2, 4, *terms, 3)
    y = (y > 0).astype(y.dtype) if likelihood == "bernoulli" else y
    check(mlp, mlp_params(), (normal(1, 4, *terms, 4), y), likelihood=likelihood)


def test_categorical_is_stable_for_large_logits(x64):
    value = jk.Objective(lambda p, x: p * x, jk.Categorical())(
        jnp.asarray(1e4), (jnp.asarray([[1.0, 0.0]]), jnp.asarray([1]))
    )
    np.testing.assert_allclose(value, 1e4)


@pytest.mark.default(1, slow=0)
@pytest.mark.parametrize("likelihood", list(LIKELIHOODS))
def test_objective_is_the_mean_over_kept_terms(x64, likelihood):
    p, x = mlp_params(), normal(1, 4, 5, 4)
    y = labels(2, 4, 5) if likelihood == "categorical" else (normal(3, 4, 5, 3) > 0).astype(x.dtype)
    mask = np.random.default_rng(4).random((4, 5)) < 0.5
    for batch in ((x, y), (x, y, jnp.asarray(mask))):
        value = objective_of(mlp, likelihood)(p, batch)
        np.testing.assert_allclose(value, mean_loss(mlp, likelihood, p, batch), rtol=1e-12)


def test_separate_bias_leaves_the_ones_column_out(x64):
    *_, factors = check(mlp, mlp_params(), (normal(1, 6, 4), labels(2, 6)), bias="separate")
    assert factors["up/kernel"].a.shape == (4, 4)


def test_joint_bias_appends_the_ones_column_last(x64):
    *_, factors = check(mlp, mlp_params(), (normal(1, 6, 4), labels(2, 6)))
    assert factors["up/kernel"].a.shape == (5, 5)
    np.testing.assert_allclose(factors["up/kernel"].a[-1, -1], 1.0)


@pytest.mark.slow
def test_bias_broadcast_by_reshape_as_flax_emits_it(x64):
    def model(p, x, tap):
        y = lax.dot_general(x, p["w"], (((2,), (0,)), ((), ())))
        return tap.dense("w", x, y + jnp.reshape(p["b"], (1, 1, -1)), bias=True)

    check(model, tree(3, w=(4, 3), b=(3,)), (normal(1, 2, 5, 4), labels(2, 2, 5)))


@pytest.mark.slow
def test_dense_general_contracts_three_axes(x64):
    def model(p, x, tap):
        dims = (((1, 2, 3), (0, 1, 2)), ((), ()))
        h = tap.dense("w", x, lax.dot_general(x, p["w"], dims) + p["b"], in_axes=3, bias=True)
        return tap.dense("v", jnp.tanh(h), jnp.tanh(h) @ p["v"])

    *_, factors = check(
        model, tree(4, w=(2, 3, 2, 5), b=(5,), v=(5, 3)), (normal(1, 4, 2, 3, 2), labels(2, 4))
    )
    assert factors["w"].a.shape == (13, 13)


@pytest.mark.slow
def test_dense_general_with_several_output_axes_and_bias(x64):
    def model(p, x, tap):
        y = jnp.einsum("nsd,dhk->nshk", x, p["w"]) + p["b"]
        y = tap.dense("w", x, y.reshape(*x.shape[:2], -1), bias=True)
        return tap.dense("v", jnp.tanh(y), jnp.tanh(y) @ p["v"])

    check(model, tree(5, w=(4, 2, 3), b=(2, 3), v=(6, 3)), (normal(1, 2, 3, 4), labels(2, 2, 3)))


def test_contracted_axes_are_flattened_in_the_parameters_order(x64):
    """The data has the axes the other way round, as in an output projection."""

    def model(p, x, tap):  # x (n, k, h), w (h, d, k): inputs are (h, k), outputs d
        y = jnp.einsum("nkh,hdk->nd", x, p["w"])
        return tap.dense("w", jnp.swapaxes(x, 1, 2), y, in_axes=2)

    check(model, tree(6, w=(2, 3, 4)), (normal(1, 5, 4, 2), labels(2, 5)))


@pytest.mark.default(1)
@pytest.mark.parametrize("spec", ["nsi,io->nso", "io,nsi->nso", "nsi,oi->nso", "oi,nsi->nso"])
def test_einsum_in_both_operand_orders(x64, spec):
    def model(p, x, tap):
        first, second = (x, p["w"]) if spec.startswith("nsi") else (p["w"], x)
        return tap.dense("w", x, jnp.einsum(spec, first, second))

    shape = (4, 3) if "io" in spec.split("->")[0] else (3, 4)
    *_, factors = check(model, tree(7, w=shape), (normal(1, 2, 5, 4), labels(2, 2, 5)))
    assert factors["w"].a.shape == (4, 4)


@pytest.mark.slow
def test_parameter_as_left_operand_with_outputs_first(x64):
    def model(p, x, tap):  # y (o, n), as `w @ x.T`
        return tap.dense("w", x, (p["w"] @ x.T).T)

    check(model, tree(8, w=(3, 4)), (normal(1, 5, 4), labels(2, 5)))


@pytest.mark.exhaustive
def test_attention_with_norm_and_head(x64):
    check(attention, attention_params(), (normal(1, 3, 4, 4), labels(2, 3, 4)))


@pytest.mark.slow
def test_projections_of_one_input_share_its_factor(x64):
    layers = jk.find_layers(
        lambda p, x: attention(p, x, PLAIN), attention_params(), normal(1, 3, 4, 4)
    )
    assert len({layers[name].input for name in ("q", "k", "v")}) == 1
    assert layers["o"].shares_input_with is None
    *_, factors = jk.value_grad_and_factors(objective_of(attention))(
        attention_params(), (normal(1, 3, 4, 4), labels(2, 3, 4))
    )
    assert len(factors.a_sums) == 3  # q = k = v, o, head


def test_a_shared_input_is_read_without_ones_by_a_layer_without_bias(x64):
    def model(p, x, tap):
        with_bias = tap.dense("w", x, x @ p["w"] + p["b"], bias=True)
        return with_bias * jnp.tanh(tap.dense("u", x, x @ p["u"]))

    *_, factors = check(model, tree(9, w=(4, 3), b=(3,), u=(4, 3)), (normal(1, 5, 4), labels(2, 5)))
    assert factors["w"].a.shape == (5, 5) and factors["u"].a.shape == (4, 4)
    assert len(factors.a_sums) == 1


# ------------------------------------------------------- embeddings and tying


@pytest.mark.slow
def test_embedding_keeps_counts_as_a_diagonal(x64):
    def model(p, ids, tap):
        h = tap.embedding("table", ids, p["table"][ids], size=7)
        return tap.dense("w", h, h @ p["w"])

    *_, factors = check(
        model, tree(10, table=(7, 4), w=(4, 3)), (labels(1, 3, 5, classes=7), labels(2, 3, 5))
    )
    assert factors["table"].a.shape == (7,)


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("index", "entry"), [(1, 1), (-1, 3), (-6, 0), (9, 3)])
def test_factors_are_those_of_the_entry_that_a_traced_index_reads(index, entry, x64):
    """Out of range it is moved to the nearest entry, as `dynamic_slice` does."""

    def model(p, inputs):
        x, k = inputs
        return x @ lax.dynamic_index_in_dim(p["w"], k, keepdims=False)

    p, inputs = tree(3, w=(4, 4, 3)), (normal(1, 5, 4), jnp.asarray(index))
    stats = jk.value_grad_and_factors(jk.Objective(model, jk.Categorical()))
    _, grads, factors = stats(p, (inputs, labels(2, 5)))
    for found in (grads["w"], factors["w"].a, factors["w"].g):
        assert np.flatnonzero(np.abs(found).sum((1, 2))) == [entry]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["clip", "fill"])
def test_tables_of_other_lengths_count_their_own_rows(mode, x64):
    """Unsigned tokens are read as they are, so both tables have the same indices."""

    def model(p, tokens):
        rows = [jnp.take(p[name], tokens, 0, mode=mode) for name in ("short", "long")]
        return jnp.tanh(sum(rows)) @ p["v"]

    p, tokens = tree(3, short=(5, 4), long=(9, 4), v=(4, 3)), jnp.asarray([4, 0, 0], jnp.uint32)
    stats = jk.value_grad_and_factors(jk.Objective(model, jk.Categorical()))
    *_, factors = stats(p, (tokens, labels(2, 3)))
    for name in ("short", "long"):
        counts = np.bincount(tokens, minlength=len(p[name]))
        np.testing.assert_allclose(factors[name].a, counts / 3, rtol=1e-12)


@pytest.mark.slow
def test_embedding_by_take(x64):
    def model(p, ids, tap):
        h = tap.embedding("table", ids, jnp.take(p["table"], ids, axis=0), size=7)
        return tap.dense("w", h, h @ p["w"])

    check(model, tree(10, table=(7, 4), w=(4, 3)), (labels(1, 3, 5, classes=7), labels(2, 3, 5)))


# of seven rows: the last ones by negative numbers, and beyond both ends
OUT_OF_RANGE = ((0, 6, 9), (-1, -7, 100), (-8, 3, -30))


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int64])
@pytest.mark.parametrize("mode", ["clip", "fill"])
def test_tokens_out_of_range_count_for_the_rows_that_are_read(x64, mode, dtype):
    def model(p, ids):
        read = p["table"].at[ids].get(mode=mode, fill_value=0 if mode == "fill" else None)
        return jnp.tanh(read) @ p["w"]

    def row(i):
        i = i + 7 if i < 0 else i  # negative numbers count from the end, once
        return min(max(i, 0), 6) if mode == "clip" else i if 0 <= i < 7 else None

    read = [row(i) for ids in OUT_OF_RANGE for i in ids]
    p, batch = tree(10, table=(7, 4), w=(4, 3)), (jnp.asarray(OUT_OF_RANGE, dtype), labels(2, 3, 3))
    objective = jk.Objective(model, jk.Categorical())
    *_, factors = jk.value_grad_and_factors(objective)(p, batch)
    counts = np.bincount([i for i in read if i is not None], minlength=7)
    np.testing.assert_allclose(factors["table"].a, counts / 9, rtol=1e-12)
    corrected = jk.correct_eigenvalues(objective, jk.eigendecompose(factors))(p, batch)
    root = root_fisher(lambda p, x, tap: model(p, x), p, batch, fisher="empirical")
    by_row = np.square(root["table"]).sum((0, 2))
    np.testing.assert_allclose(corrected["table"].raw_values.sum(1), by_row, rtol=1e-10)


@pytest.mark.exhaustive
def test_tied_embedding_and_head_have_one_block_per_orientation(x64):
    def model(p, ids, tap):
        h = tap.embedding("embedding", ids, p["table"][ids], size=6)
        h = jnp.tanh(tap.dense("w", h, h @ p["w"]))
        return tap.dense("head", h, h @ p["table"].T)

    p, batch = (
        tree(11, table=(6, 4), w=(4, 4)),
        (labels(1, 3, 5, classes=6), labels(2, 3, 5, classes=6)),
    )
    value, grads, factors = jk.value_grad_and_factors(objective_of(model))(p, batch)
    assert_tree_close(
        grads, jax.grad(lambda p: mean_loss(model, "categorical", p, batch))(p), 1e-10
    )
    expected = oracle(model, p, batch)
    tied = {layer.kind: layer for layer in factors.layers if layer.weight.path == "table"}
    assert set(tied) == {"embedding", "dense"}
    assert_block_close(factors[tied["embedding"].name], expected["embedding"], 1e-10)
    assert_block_close(factors[tied["dense"].name], expected["head"], 1e-10)
    assert_block_close(factors["w"], expected["w"], 1e-10)
    assert "table" in factors


@pytest.mark.slow
def test_several_uses_of_one_parameter_add(x64):
    def model(p, x, tap):
        for _ in range(3):
            x = jnp.tanh(tap.dense("w", x, x @ p["w"] + p["b"], bias=True))
        return tap.dense("v", x, x @ p["v"])

    p, batch = tree(12, w=(4, 4), b=(4,), v=(4, 3)), (normal(1, 5, 4), labels(2, 5))
    *_, factors = check(model, p, batch)
    assert factors.layer("w").uses == 3


@pytest.mark.slow
def test_two_uses_with_different_numbers_of_rows_add(x64):
    def model(p, x, tap):  # tokens, then their mean
        h = jnp.tanh(tap.dense("w", x, x @ p["w"])).mean(axis=1)
        return tap.dense("w", h, h @ p["w"])

    check(model, tree(13, w=(4, 4)), (normal(1, 3, 5, 4), labels(2, 3, classes=4)))


@pytest.mark.slow
def test_wide_layers(x64):
    """Sizes at which a library may switch to another way of forming the products."""
    check(mlp, mlp_params(i=515, h=513, o=3), (normal(1, 4, 515), labels(2, 4)))


@pytest.mark.exhaustive
def test_wide_layers_in_a_scan(x64):
    def model(p, x, tap):
        x, _ = lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, p["w"])
        return tap.dense("head", x, x @ p["head"])

    def plain(p, x, tap):
        for i in range(2):
            x = x + jnp.tanh(tap.dense("w", x, x @ p["w"][i], at=(i,)))
        return tap.dense("head", x, x @ p["head"])

    p, batch = tree(37, w=(2, 513, 513), head=(513, 3)), (normal(1, 3, 513), labels(2, 3))
    check(model, p, batch, oracle_model=plain)


# ------------------------------------------------- scales, biases, convolution


@pytest.mark.slow
def test_layer_norm_scale_and_bias_are_diagonals(x64):
    def model(p, x, tap):
        normed = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
        h = tap.scale("norm/scale", normed, normed * p["norm"]["scale"], shape=(4,))
        h = tap.lone_bias("norm/bias", h + p["norm"]["bias"], shape=(4,))
        return tap.dense("w", h, h @ p["w"])

    p = tree(14, norm__scale=(4,), norm__bias=(4,), w=(4, 3))
    *_, factors = check(model, p, (normal(1, 3, 5, 4), labels(2, 3, 5)))
    assert factors["norm/scale"].diagonal.shape == (4,)


@pytest.mark.slow
def test_scale_written_as_one_plus_parameter(x64):
    """As in Gemma: the derivative is that of a plain scale."""

    def model(p, x, tap):
        h = rms(x)
        h = tap.scale("scale", h, h * (1.0 + p["scale"]), shape=(4,))
        return tap.dense("w", h, h @ p["w"])

    check(model, tree(15, scale=(4,), w=(4, 3)), (normal(1, 3, 5, 4), labels(2, 3, 5)))


@pytest.mark.slow
def test_a_bias_whose_product_has_another_reader_is_lone(x64):
    def model(p, x, tap):
        product = tap.dense("w", x, x @ p["w"])
        return tap.lone_bias("b", product + p["b"], shape=(3,)) * jnp.tanh(product)

    check(model, tree(16, w=(4, 3), b=(3,)), (normal(1, 5, 4), labels(2, 5)))


@pytest.mark.slow
def test_a_bias_over_fewer_axes_than_the_product_is_lone(x64):
    def model(p, x, tap):  # one bias for both heads, which are features
        y = tap.dense("w", x, jnp.einsum("nd,dhk->nhk", x, p["w"]).reshape(x.shape[0], -1))
        y = tap.lone_bias("b", y.reshape(-1, 2, 3) + p["b"], shape=(3,), row_axes=1)
        return y.sum(axis=1)

    check(model, tree(17, w=(4, 2, 3), b=(3,)), (normal(1, 5, 4), labels(2, 5)))


@pytest.mark.slow
def test_position_table_and_class_token_are_lone_biases(x64):
    def model(p, x, tap):
        n, s, d = x.shape
        token = tap.lone_bias(
            "token", jnp.broadcast_to(p["token"], (n, 1, d)), shape=(1, 1, d), row_axes=1
        )
        x = jnp.concatenate([token, x], axis=1)
        x = tap.lone_bias("positions", x + p["positions"], shape=(s + 1, d), row_axes=1)
        x = jnp.tanh(x).sum(axis=1)
        return tap.dense("w", x, x @ p["w"])

    p = tree(18, token=(1, 1, 4), positions=(6, 4), w=(4, 3))
    check(model, p, (normal(1, 3, 5, 4), labels(2, 3)))


@pytest.mark.slow
def test_position_table_read_by_arange_or_slice(x64):
    def model(p, x, tap):
        x = tap.lone_bias("positions", x + p["positions"][:5], shape=(5, 4), row_axes=1)
        return tap.dense("w", jnp.tanh(x), jnp.tanh(x) @ p["w"])

    p, batch = tree(18, positions=(8, 4), w=(4, 3)), (normal(1, 3, 5, 4), labels(2, 3, 5))
    stats = jk.value_grad_and_factors(objective_of(model))
    value, grads, factors = stats(p, batch)
    assert_tree_close(
        grads, jax.grad(lambda p: mean_loss(model, "categorical", p, batch))(p), 1e-10
    )
    expected = oracle(model, p, batch)
    assert_block_close(factors["w"], expected["w"], 1e-10)
    (name,) = [layer.name for layer in factors.layers if layer.weight.path == "positions"]
    block = factors[name]
    if hasattr(block, "diagonal"):  # a lone bias; the rows that were not read are zero
        read = np.asarray(block.diagonal)
        np.testing.assert_allclose(read[:5], expected["positions"].diagonal, atol=1e-10)
        assert not read[5:].any()
    else:  # or an embedding
        np.testing.assert_allclose(block.a[:5], np.full(5, 0.2), atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("strides, padding", [(1, 0), (2, 1)])
def test_convolution_in_one_dimension(x64, strides, padding):
    def model(p, x, tap):
        pads = ((padding, padding),)
        y = lax.conv_general_dilated(
            x, p["k"], (strides,), pads, dimension_numbers=("NHC", "HIO", "NHC")
        )
        rows = patches(x, (3,), (strides,), pads)
        y = tap.dense("k", rows, y + p["b"], in_axes=2, bias=True)
        y = jnp.tanh(y).mean(axis=1)
        return tap.dense("w", y, y @ p["w"])

    check(model, tree(19, k=(3, 2, 4), b=(4,), w=(4, 3)), (normal(1, 3, 7, 2), labels(2, 3)))


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("bias", ["joint", "separate"])
@pytest.mark.parametrize(
    "strides, padding", [((1, 1), ((0, 0), (0, 0))), ((2, 1), ((1, 1), (0, 1)))]
)
def test_convolution_in_two_dimensions(x64, bias, strides, padding):
    def model(p, x, tap):
        y = lax.conv_general_dilated(
            x, p["k"], strides, padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        rows = patches(x, (3, 2), strides, padding)
        y = tap.dense("k", rows, y + p["b"], in_axes=3, bias=True)
        y = jnp.tanh(y).mean(axis=(1, 2))
        return tap.dense("w", y, y @ p["w"])

    p = tree(20, k=(3, 2, 2, 4), b=(4,), w=(4, 3))
    check(model, p, (normal(1, 3, 5, 4, 2), labels(2, 3)), bias=bias)


@pytest.mark.slow
def test_convolution_with_channels_first(x64):
    """Equinox and PyTorch layout: the kernel is (out, in, h, w), and A is in (in, h, w)."""

    def model(p, x, tap):
        y = lax.conv_general_dilated(
            x, p["k"], (1, 1), "VALID", dimension_numbers=("NCHW", "OIHW", "NCHW")
        )
        rows = jnp.moveaxis(patches(jnp.moveaxis(x, 1, -1), (2, 3)), -1, 3)
        y = tap.dense("k", rows, jnp.moveaxis(y, 1, -1), in_axes=3)
        y = jnp.tanh(y).mean(axis=(1, 2))
        return tap.dense("w", y, y @ p["w"])

    check(model, tree(21, k=(4, 2, 2, 3), w=(4, 3)), (normal(1, 3, 2, 4, 5), labels(2, 3)))


@pytest.mark.slow
def test_dilated_convolution(x64):
    def model(p, x, tap):
        y = lax.conv_general_dilated(
            x, p["k"], (1,), "VALID", rhs_dilation=(2,), dimension_numbers=("NHC", "HIO", "NHC")
        )
        rows = jnp.stack([x[:, i : i + 4] for i in (0, 2, 4)], axis=2)
        y = tap.dense("k", rows, y, in_axes=2)
        y = jnp.tanh(y).mean(axis=1)
        return tap.dense("w", y, y @ p["w"])

    check(model, tree(22, k=(3, 2, 4), w=(4, 3)), (normal(1, 3, 8, 2), labels(2, 3)))


# ------------------------------------------------------------- loops and walls


@pytest.mark.exhaustive
@pytest.mark.parametrize("jit", [True, False])
def test_scan_of_remat_of_jit(x64, jit):
    batch = (normal(1, 3, 5, 4), labels(2, 3, 5))
    *_, factors = check(scanned, scanned_params(), batch, oracle_model=unrolled, jit=jit)
    assert factors["blocks/kernel"].a.shape == (3, 5, 5)
    assert factors.layer("blocks/kernel").stack == (3,)


@pytest.mark.exhaustive
def test_nested_scans_stack_twice(x64):
    def model(p, x, tap):
        outer = lambda x, w: (lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0], None)
        x, _ = lax.scan(outer, x, p["w"])
        return tap.dense("head", x, x @ p["head"])

    def plain(p, x, tap):
        for i in range(2):
            for j in range(3):
                x = jnp.tanh(tap.dense("w", x, x @ p["w"][i, j], at=(i, j)))
        return tap.dense("head", x, x @ p["head"])

    p, batch = tree(24, w=(2, 3, 4, 4), head=(4, 3)), (normal(1, 5, 4), labels(2, 5))
    *_, factors = check(model, p, batch, oracle_model=plain)
    assert factors["w"].g.shape == (2, 3, 4, 4)


@pytest.mark.slow
def test_reverse_and_partly_unrolled_scan(x64):
    def model(p, x, tap):
        step = lambda x, w: (jnp.tanh(x @ w), None)
        x, _ = lax.scan(step, x, p["w"], reverse=True, unroll=2)
        return tap.dense("head", x, x @ p["head"])

    def plain(p, x, tap):
        for i in reversed(range(4)):
            x = jnp.tanh(tap.dense("w", x, x @ p["w"][i], at=(i,)))
        return tap.dense("head", x, x @ p["head"])

    p, batch = tree(25, w=(4, 4, 4), head=(4, 3)), (normal(1, 5, 4), labels(2, 5))
    check(model, p, batch, oracle_model=plain)


@pytest.mark.exhaustive
def test_parameters_constant_in_a_scan_have_one_block(x64):
    p, batch = tree(26, w=(2, 4), u=(4, 4), b=(4,), head=(4, 3)), (normal(1, 3, 6, 2), labels(2, 3))
    *_, factors = check(recurrent, p, batch, oracle_model=recurrent_unrolled)
    assert factors["u"].a.shape == (4, 4) and factors.layer("u").stack == ()


@pytest.mark.exhaustive
def test_scanned_embedding_scale_and_lone_bias(x64):
    def model(p, x, tap):
        def step(x, w):
            h = rms(x) * w["scale"] + w["shift"]
            return x + jnp.tanh(h @ w["kernel"]), None

        x, _ = lax.scan(step, x, p["b"])
        return tap.dense("head", x, x @ p["head"])

    def plain(p, x, tap):
        for i in range(2):
            w = jax.tree.map(lambda v: v[i], p["b"])  # noqa: B023
            h = tap.scale("b/scale", rms(x), rms(x) * w["scale"], shape=(4,), at=(i,))
            h = tap.lone_bias("b/shift", h + w["shift"], shape=(4,), at=(i,))
            x = x + jnp.tanh(tap.dense("b/kernel", h, h @ w["kernel"], at=(i,)))
        return tap.dense("head", x, x @ p["head"])

    p = tree(27, b__scale=(2, 4), b__shift=(2, 4), b__kernel=(2, 4, 4), head=(4, 3))
    check(model, p, (normal(1, 3, 5, 4), labels(2, 3, 5)), oracle_model=plain)


def _layer_by_wrapping(wrap):
    def model(p, x, tap):
        f = wrap(lambda w, b, x: jnp.tanh(x @ w + b))
        h = f(p["up"]["kernel"], p["up"]["bias"], x)
        return h @ p["down"]["kernel"] + p["down"]["bias"]

    return model


@pytest.mark.default(1, slow=0)
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "wrap",
    [
        jax.jit,
        jax.checkpoint,
        lambda f: jax.jit(jax.checkpoint(jax.jit(f))),
        lambda f: jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable),
        lambda f: jax.checkpoint(f, prevent_cse=False),
        lambda f: jax.vmap(f, in_axes=(None, None, 0)),
        lambda f: jax.named_call(f, name="inner"),
    ],
    ids=["jit", "remat", "jit-remat-jit", "dots_saveable", "no-cse", "vmap", "named"],
)
def test_walls_change_nothing(x64, wrap):
    check(_layer_by_wrapping(wrap), mlp_params(), (normal(1, 4, 4), labels(2, 4)), oracle_model=mlp)


# ------------------------------------------------------------------ experts


def _experts(p, x, tap):
    h = jnp.tanh(jnp.einsum("bti,eio->ebto", x, p["w"]))
    return jnp.einsum("ebto,eoc->btc", h, p["v"])


def _experts_stacked(p, x, tap):
    """Each expert is a layer; the second product sums over experts and is one layer."""
    parts = []
    for e in range(2):
        parts.append(jnp.tanh(tap.dense("w", x, x @ p["w"][e], at=(e,))))
    h = jnp.stack(parts, axis=2)
    return tap.dense("v", h, jnp.einsum("bteo,eoc->btc", h, p["v"]), in_axes=2)


def _experts_joined(p, x, tap):
    h = jnp.einsum("bti,eio->bteo", x, p["w"]).reshape(*x.shape[:2], -1)
    h = jnp.tanh(tap.dense("w", x, h)).reshape(*x.shape[:2], 2, -1)
    return tap.dense("v", h, jnp.einsum("bteo,eoc->btc", h, p["v"]), in_axes=2)


@pytest.mark.slow
def test_experts_on_the_same_input_follow_the_reading_in_the_table(x64):
    """Both readings of `bti,eio->ebto` are right; the table says which one was taken."""
    p, batch = tree(28, w=(2, 4, 5), v=(2, 5, 3)), (normal(1, 3, 2, 4), labels(2, 3, 2))
    layers = jk.find_layers(lambda p, x: _experts(p, x, PLAIN), p, batch[0])
    stack = layers["w"].stack
    assert stack in ((2,), ())
    check(_experts, p, batch, oracle_model=_experts_stacked if stack else _experts_joined)


@pytest.mark.slow
def test_batched_experts_are_a_stack(x64):
    def model(p, x, tap):
        h = jnp.einsum("ebi,eio->ebo", jnp.stack([x, jnp.sin(x)]), p["w"])
        return jnp.tanh(h[0]) * h[1]

    def plain(p, x, tap):
        h = [tap.dense("w", y, y @ p["w"][e], at=(e,)) for e, y in enumerate((x, jnp.sin(x)))]
        return jnp.tanh(h[0]) * h[1]

    p, batch = tree(29, w=(2, 4, 3)), (normal(1, 5, 4), labels(2, 5))
    *_, factors = check(model, p, batch, oracle_model=plain)
    assert factors["w"].a.shape == (2, 4, 4) and factors.layer("w").stack == (2,)


@pytest.mark.slow
def test_batched_experts_with_bias_per_expert(x64):
    def model(p, x, tap):
        h = jnp.einsum("ebi,eio->ebo", jnp.stack([x, jnp.sin(x)]), p["w"]) + p["b"][:, None]
        return jnp.tanh(h[0]) * h[1]

    def plain(p, x, tap):
        h = [
            tap.dense("w", y, y @ p["w"][e] + p["b"][e], at=(e,), bias=True)
            for e, y in enumerate((x, jnp.sin(x)))
        ]
        return jnp.tanh(h[0]) * h[1]

    p, batch = tree(29, w=(2, 4, 3), b=(2, 3)), (normal(1, 5, 4), labels(2, 5))
    check(model, p, batch, oracle_model=plain)


# -------------------------------------------------------- masks and positions


@pytest.mark.slow
def test_loss_mask_changes_g_and_its_count_only(x64):
    mask = jnp.asarray(np.random.default_rng(5).random((3, 5)) < 0.6)
    batch = (normal(1, 3, 5, 4), labels(2, 3, 5))
    *_, masked = check(mlp, mlp_params(), (*batch, mask))
    *_, whole = check(mlp, mlp_params(), batch)
    np.testing.assert_allclose(masked["up/kernel"].a, whole["up/kernel"].a, atol=1e-12)
    assert float(masked.terms) == float(mask.sum())


@pytest.mark.exhaustive
def test_loss_mask_through_attention(x64):
    mask = jnp.asarray(np.random.default_rng(6).random((3, 4)) < 0.6)
    check(attention, attention_params(), (normal(1, 3, 4, 4), labels(2, 3, 4), mask))


@pytest.mark.slow
def test_loss_mask_over_examples(x64):
    mask = jnp.asarray([True, False, True, True])
    check(mlp, mlp_params(), (normal(1, 4, 4), labels(2, 4), mask))


def test_a_mask_of_integers_is_named(x64):
    """Are they a mask or weights? Floating numbers are weights (tests/reports/weights_test.py)."""
    batch = (normal(1, 4, 4), labels(2, 4), jnp.asarray([1, 0, 2, 1]))
    with pytest.raises((ValueError, TypeError), match="(?s)mask.*bool"):
        jk.value_grad_and_factors(objective_of(mlp))(mlp_params(), batch)


def _positions():
    return jnp.asarray(np.arange(5) < np.array([[5], [3], [1]]))


@pytest.mark.slow
def test_positions_take_padding_out_of_both_factors(x64):
    here = _positions()
    *_, factors = check(
        mlp, mlp_params(), (normal(1, 3, 5, 4), labels(2, 3, 5), here), positions=here
    )
    np.testing.assert_allclose(factors["up/kernel"].a[-1, -1], 1.0)


@pytest.mark.slow
def test_positions_through_attention(x64):
    here = _positions()[:, :4]
    check(
        attention, attention_params(), (normal(1, 3, 4, 4), labels(2, 3, 4), here), positions=here
    )


def test_positions_and_loss_mask_are_different_things(x64):
    here = _positions()
    mask = here & jnp.asarray(np.random.default_rng(7).random((3, 5)) < 0.7)
    check(mlp, mlp_params(), (normal(1, 3, 5, 4), labels(2, 3, 5), mask), positions=here)


@pytest.mark.exhaustive
def test_positions_through_scan_remat_and_jit(x64):
    here = _positions()
    batch = (normal(1, 3, 5, 4), labels(2, 3, 5), here)
    check(scanned, scanned_params(), batch, oracle_model=unrolled, positions=here)


@pytest.mark.exhaustive
def test_positions_with_scale_bias_and_embedding(x64):
    def model(p, ids, tap):
        h = tap.embedding("table", ids, p["table"][ids], size=7)
        h = tap.lone_bias("shift", h + p["shift"], shape=(4,))
        h = tap.scale("scale", rms(h), rms(h) * p["scale"], shape=(4,))
        return tap.dense("w", h, h @ p["w"])

    here = _positions()
    p = tree(30, table=(7, 4), shift=(4,), scale=(4,), w=(4, 3))
    check(model, p, (labels(1, 3, 5, classes=7), labels(2, 3, 5), here), positions=here)


@pytest.mark.slow
def test_padding_may_hold_nan(x64):
    """Zero rows are chosen, not multiplied: NaN in padding must not reach a factor."""
    here = _positions()
    x = jnp.where(here[..., None], normal(1, 3, 5, 4), jnp.nan)
    stats = jk.value_grad_and_factors(objective_of(mlp))
    *_, factors = stats(mlp_params(), (x, labels(2, 3, 5), here), positions=here)
    rows = np.asarray(x)[np.asarray(here)]
    np.testing.assert_allclose(
        factors["up/kernel"].a[:-1, :-1], rows.T @ rows / len(rows), atol=1e-10
    )


def _pooling(mark):
    """The outputs have no position axis, so only the model can say what the rows are."""

    def model(p, inputs, tap):
        x, here = inputs
        x = jk.mark_rows(x, here) if mark else x
        h = jnp.tanh(tap.dense("w", x, x @ p["w"]))
        keep = here[..., None].astype(h.dtype)
        pooled = (h * keep).sum(1) / keep.sum(1)
        return tap.dense("v", pooled, pooled @ p["v"], positioned=False)

    return model


def test_marked_rows_leave_the_factors_without_positions(x64):
    here, p = _positions(), tree(31, w=(4, 4), v=(4, 3))
    batch = ((normal(1, 3, 5, 4), here), labels(2, 3))
    *_, factors = jax.jit(jk.value_grad_and_factors(objective_of(_pooling(True))))(p, batch)
    assert_factors_close(factors, oracle(_pooling(False), p, batch, positions=here), 1e-10)


def test_positions_that_the_outputs_do_not_have_raise(x64):
    here, p = _positions(), tree(31, w=(4, 4), v=(4, 3))
    batch = ((normal(1, 3, 5, 4), here), labels(2, 3))
    with pytest.raises(jk.LostRowsError, match="w"):
        jk.value_grad_and_factors(objective_of(_pooling(False)))(p, batch, positions=here)


@pytest.mark.slow
def test_mark_rows_names_the_rows_of_a_second_stream(x64):
    """An encoder stream of another length: its rows are named inside the model."""

    def model(p, inputs, tap, mark=True):
        x, memory, exists = inputs
        marked = jk.mark_rows(memory, exists) if mark else memory
        k = tap.dense("k", marked, marked @ p["k"], positioned=False)
        q = tap.dense("q", x, x @ p["q"])
        scores = jnp.einsum("nsd,ntd->nst", q, k)
        scores = jnp.where(exists[:, None], scores, -1e9)
        return jnp.einsum("nst,ntd->nsd", jax.nn.softmax(scores, -1), memory)

    here = _positions()
    exists = jnp.asarray(np.arange(6) < np.array([[6], [4], [2]]))
    p = tree(32, q=(4, 3), k=(4, 3))
    memory = jnp.where(exists[..., None], normal(3, 3, 6, 4), 0.0)
    x, y = normal(1, 3, 5, 4), labels(2, 3, 5, classes=4)
    batch = ((x, memory, exists), y, here)
    stats = jk.value_grad_and_factors(objective_of(model))
    *_, factors = jax.jit(stats)(p, batch, positions=here)
    rows = np.asarray(memory)[np.asarray(exists)]
    np.testing.assert_allclose(factors["k"].a, rows.T @ rows / len(rows), atol=1e-10)
    plain = lambda p, x, tap: model(p, x, tap, mark=False)
    expected = oracle(plain, p, batch, positions=here)
    assert_block_close(factors["q"], expected["q"], 1e-10)
    # padding of the memory has zero attention, so its rows add nothing to G
    np.testing.assert_allclose(factors["k"].g, expected["k"].g, atol=1e-10)


def _marked_pooling(p, x, here):
    """One example; its rows are marked in the model."""
    h = jnp.tanh(jk.mark_rows(x, here) @ p["w"])
    return jnp.where(here[:, None], h, 0.0).sum(0) @ p["v"]


@pytest.mark.default(1)
@pytest.mark.parametrize("axes", [(0, 0), (1, 0), (0, 1), (0, None)])
def test_rows_are_marked_under_vmap_whichever_axis_it_maps(axes, x64):
    """Five examples of five positions: sizes alone do not tell the axes apart."""
    here, p, x = (
        _positions()[jnp.array([0, 1, 2, 1, 2])],
        tree(31, w=(4, 4), v=(4, 3)),
        normal(1, 5, 5, 4),
    )
    here = jnp.broadcast_to(here[1], here.shape) if axes[1] is None else here

    def model(p, inputs):
        x, here = (y if d is None else jnp.moveaxis(y, 0, d) for y, d in zip(inputs, axes))
        each = lambda x, here: _marked_pooling(p, x, here)
        return jax.vmap(each, axes)(x, here[0] if axes[1] is None else here)

    stats = jk.value_grad_and_factors(jk.Objective(model, jk.Categorical()))
    *_, factors = stats(p, ((x, here), labels(2, 5)))
    rows = np.asarray(x)[np.asarray(here)]
    np.testing.assert_allclose(factors["w"].a, rows.T @ rows / len(rows), rtol=1e-10)


def test_rows_may_be_marked_inside_a_derivative(x64):
    here, p, x = _positions(), tree(31, w=(4, 4), v=(4, 3)), normal(1, 3, 5, 4)

    def model(p, inputs):
        x, here = inputs

        def pooled(x):
            h = jk.mark_rows(jnp.tanh(x), here) @ p["w"]
            return jnp.where(here[..., None], h, 0.0).sum(1) @ p["v"]

        return jax.jvp(pooled, (x,), (jnp.ones_like(x),))[1]

    stats = jk.value_grad_and_factors(jk.Objective(model, jk.Categorical()))
    *_, factors = stats(p, ((x, here), labels(2, 3)))
    rows = 1 / np.cosh(np.asarray(x)[np.asarray(here)]) ** 2  # the tangents that the kernel reads
    np.testing.assert_allclose(factors["w"].a, rows.T @ rows / len(rows), rtol=1e-10)


def test_a_marked_parameter_keeps_its_statistics(x64):
    def model(p, x, tap, mark=True):
        token = jk.mark_rows(p["token"], jnp.ones(5, bool)) if mark else p["token"]
        return tap.dense("v", x, x @ p["v"]) + token

    p, batch = tree(31, v=(4, 3), token=(5, 3)), (normal(1, 3, 5, 4), labels(2, 3, 5))
    found, expected = (
        jk.value_grad_and_factors(objective_of(functools.partial(model, mark=mark)))(p, batch)
        for mark in (True, False)
    )
    diagonal = expected.factors["token"].diagonal
    np.testing.assert_allclose(found.factors["token"].diagonal, diagonal, rtol=1e-12)


def test_mark_rows_is_an_identity(x64):
    x, mask = normal(1, 3, 5, 4), _positions()
    np.testing.assert_array_equal(jk.mark_rows(x, mask), x)
    gradient = jax.grad(lambda x: jnp.sum(jnp.sin(jk.mark_rows(x, mask))))(x)
    np.testing.assert_allclose(gradient, jnp.cos(x), rtol=1e-12)


def test_lost_rows_raise_when_a_mask_is_given(x64):
    """Sorting mixes positions: nobody can say which rows were padding before it."""

    def model(p, x, tap):
        h = tap.dense("w", x, x @ p["w"])
        h = jnp.sort(h.reshape(-1, 4), axis=0).reshape(x.shape)
        return tap.dense("v", h, h @ p["v"])

    here, p = _positions(), tree(33, w=(4, 4), v=(4, 3))
    batch = (normal(1, 3, 5, 4), labels(2, 3, 5), here)
    stats = jk.value_grad_and_factors(objective_of(model))
    stats(p, batch)  # without positions there is nothing to lose
    with pytest.raises(jk.LostRowsError, match="layer 'w'") as error:
        stats(p, batch, positions=here)
    assert "mark_rows" in str(error.value)


# ------------------------------------------------------------------ sampling


def _samples(model, p, batch, likelihood, count):
    options = {"fisher": "mc", "scales": "diagonal"}
    stats = jk.value_grad_and_factors(objective_of(model, likelihood), **options)
    keys = jax.random.split(jax.random.key(0), count)
    return jax.jit(jax.vmap(lambda k: stats(p, batch, key=k)[2]))(keys)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("likelihood", list(LIKELIHOODS))
def test_sampled_labels_are_unbiased_when_outputs_mix_tokens(x64, likelihood):
    """Mean over keys against the exact Fisher factor; labels shared by the terms of one
    example would put cross terms between tokens into G and fail this.
    """
    p, x = attention_params(), normal(1, 2, 3, 4, scale=1.0)
    y = labels(2, 2, 3) if likelihood == "categorical" else jnp.zeros((2, 3, 3))
    count = 2000
    sampled = _samples(attention, p, (x, y), likelihood, count)
    exact = oracle(attention, p, (x, y), likelihood=likelihood, fisher="exact")
    for name, block in exact.items():
        side = "diagonal" if block.g is None else "g"
        draws = np.asarray(getattr(jax.vmap(lambda f, n=name: f[n])(sampled), side))
        error = np.abs(draws.mean(0) - getattr(block, side))
        # five standard errors of the mean: about one false alarm in a million entries
        assert (error <= 5 * draws.std(0) / np.sqrt(count) + 1e-12).all(), name
        assert draws.std(0).max() > 0


@pytest.mark.slow
def test_labels_of_different_terms_are_independent(x64):
    """With a bias on the logits alone, Σ_r over terms of G is p(1-p) only if labels of
    terms do not repeat: shared labels would multiply the example's summed gradient.
    """

    def model(p, x, tap):
        pooled = jnp.broadcast_to(x.sum(1, keepdims=True), x.shape)
        return tap.dense("w", pooled[:, 0], pooled[:, 0] @ p["w"])[:, None] + 0 * x[..., :1]

    p = {"w": normal(1, 4, 3)}
    batch = (normal(2, 2, 6, 4), labels(3, 2, 6))
    sampled = _samples(model, p, batch, "categorical", 4000)
    draws = np.asarray(jax.vmap(lambda f: f["w"].g)(sampled))
    exact = oracle(model, p, batch, fisher="exact")["w"].g
    error = np.abs(draws.mean(0) - exact)
    assert (error <= 5 * draws.std(0) / np.sqrt(len(draws)) + 1e-12).all()


@pytest.mark.slow
def test_sampled_labels_leave_value_gradient_and_inputs_alone(x64):
    p, batch = mlp_params(), (normal(1, 4, 4), labels(2, 4))
    key = jax.random.key(3)
    mc = jk.value_grad_and_factors(objective_of(mlp), fisher="mc")(p, batch, key=key)
    empirical = jk.value_grad_and_factors(objective_of(mlp))(p, batch)
    assert_tree_close(mc[:2], empirical[:2], 1e-12)
    for name in mc[2]:
        np.testing.assert_allclose(mc[2][name].a, empirical[2][name].a, atol=1e-12)
    assert np.abs(np.asarray(mc[2]["up/kernel"].g - empirical[2]["up/kernel"].g)).max() > 1e-3


@pytest.mark.slow
def test_sampled_labels_do_not_read_the_targets(x64):
    p, x, key = mlp_params(), normal(1, 4, 4), jax.random.key(3)
    stats = jax.jit(jk.value_grad_and_factors(objective_of(mlp), fisher="mc"))
    one, two = (stats(p, (x, labels(s, 4)), key=key)[2] for s in (2, 9))
    assert_tree_close(one, two, 0.0)


def test_sampled_labels_follow_the_key(x64):
    p, batch = mlp_params(), (normal(1, 4, 4), labels(2, 4))
    stats = jax.jit(jk.value_grad_and_factors(objective_of(mlp), fisher="mc"))
    same = [stats(p, batch, key=jax.random.key(1))[2]["up/kernel"].g for _ in range(2)]
    np.testing.assert_array_equal(*same)
    other = stats(p, batch, key=jax.random.key(2))[2]["up/kernel"].g
    assert np.abs(np.asarray(other - same[0])).max() > 0


@pytest.mark.exhaustive
def test_masked_terms_are_not_sampled_into_g(x64):
    p, x, y = mlp_params(), normal(1, 3, 2, 4), labels(2, 3, 2)
    mask = jnp.asarray([[1, 0], [1, 1], [0, 0]], bool)
    sampled = _samples(mlp, p, (x, y, mask), "categorical", 3000)
    draws = np.asarray(jax.vmap(lambda f: f["up/kernel"].g)(sampled))
    exact = oracle(mlp, p, (x, y, mask), fisher="exact")["up/kernel"].g
    error = np.abs(draws.mean(0) - exact)
    assert (error <= 5 * draws.std(0) / np.sqrt(len(draws)) + 1e-12).all()


# ------------------------------------------------------------------- options


@pytest.mark.slow
def test_a_side_beyond_max_dense_is_kept_as_its_diagonal(x64):
    p, batch = mlp_params(i=6, h=5, o=3), (normal(1, 4, 6), labels(2, 4))
    objective = objective_of(mlp)
    _, grads, factors = jk.value_grad_and_factors(objective, max_dense=5)(p, batch)
    expected = oracle(mlp, p, batch)
    up, down = factors["up/kernel"], factors["down/kernel"]
    np.testing.assert_allclose(up.a, np.diag(expected["up/kernel"].a), atol=1e-10)
    np.testing.assert_allclose(up.g, expected["up/kernel"].g, atol=1e-10)
    np.testing.assert_allclose(down.g, expected["down/kernel"].g, atol=1e-10)
    assert_tree_close(grads, jax.grad(objective)(p, batch), 1e-10)
    assert not factors.layer("up/kernel").a_dense and factors.layer("up/kernel").g_dense


@pytest.mark.slow
def test_an_output_side_beyond_max_dense_is_a_diagonal(x64):
    def model(p, x, tap):
        return tap.dense("w", x, x @ p["w"])

    p, batch = tree(34, w=(3, 7)), (normal(1, 4, 3), labels(2, 4, classes=7))
    *_, factors = jk.value_grad_and_factors(objective_of(model), max_dense=4)(p, batch)
    expected = oracle(model, p, batch)["w"]
    np.testing.assert_allclose(factors["w"].g, np.diag(expected.g), atol=1e-10)
    np.testing.assert_allclose(factors["w"].a, expected.a, atol=1e-10)


@pytest.mark.slow
def test_diagonal_sides_of_a_scanned_stack(x64):
    p, batch = scanned_params(), (normal(1, 3, 5, 4), labels(2, 3, 5))
    *_, factors = jk.value_grad_and_factors(objective_of(scanned), max_dense=3)(p, batch)
    expected = oracle(unrolled, p, batch)["blocks/kernel"]
    diagonal = np.diagonal(expected.a, axis1=-2, axis2=-1)
    np.testing.assert_allclose(factors["blocks/kernel"].a, diagonal, atol=1e-10)
    diagonal = np.diagonal(expected.g, axis1=-2, axis2=-1)
    np.testing.assert_allclose(factors["blocks/kernel"].g, diagonal, atol=1e-10)


def test_layers_option_is_a_full_match_and_keeps_the_gradient(x64):
    p, batch = mlp_params(), (normal(1, 4, 4), labels(2, 4))
    objective = objective_of(mlp)
    _, grads, factors = jk.value_grad_and_factors(objective, layers="up/.*")(p, batch)
    assert set(factors) == {"up/kernel"}
    assert_block_close(factors["up/kernel"], oracle(mlp, p, batch)["up/kernel"], 1e-10)
    assert_tree_close(grads, jax.grad(objective)(p, batch), 1e-10)
    with pytest.raises(jk.UnknownLayerError):
        jk.value_grad_and_factors(objective, layers="up")(p, batch)


@pytest.mark.slow
def test_a_chosen_layer_reads_its_input_where_the_sharing_layer_was_not_chosen(x64):
    p, batch = attention_params(), (normal(1, 3, 4, 4), labels(2, 3, 4))
    *_, factors = jk.value_grad_and_factors(objective_of(attention), layers="v|o")(p, batch)
    expected = oracle(attention, p, batch)
    assert_factors_close(factors, {name: expected[name] for name in ("v", "o")}, 1e-10)


@pytest.mark.slow
def test_auxiliary_outputs_come_back(x64):
    p, batch = mlp_params(), (normal(1, 4, 4), labels(2, 4))

    def apply_fn(p, x):
        y = mlp(p, x, PLAIN)
        return y, {"mean": jnp.mean(y)}

    objective = jk.Objective(apply_fn, jk.Categorical(), has_aux=True)
    stats = jk.value_grad_and_factors(objective, has_aux=True)
    (value, aux), grads, factors = jax.jit(stats)(p, batch)
    np.testing.assert_allclose(value, mean_loss(mlp, "categorical", p, batch), rtol=1e-12)
    np.testing.assert_allclose(aux["mean"], jnp.mean(mlp(p, batch[0], PLAIN)), rtol=1e-12)
    assert_factors_close(factors, oracle(mlp, p, batch), 1e-10)


def test_auxiliary_outputs_of_a_scalar_loss(x64):
    p, (x, y) = mlp_params(), (normal(1, 4, 4), labels(2, 4))

    def loss(p, batch):
        value = mean_loss(mlp, "categorical", p, batch)
        return value, {"twice": 2 * value}

    stats = jk.value_grad_and_factors(loss, has_aux=True, loss_terms=4)
    (value, aux), grads, factors = jax.jit(stats)(p, (x, y))
    np.testing.assert_allclose(aux["twice"], 2 * value)
    assert_factors_close(factors, oracle(mlp, p, (x, y)), 1e-10)


@pytest.mark.slow
def test_scalar_loss_with_its_number_of_terms(x64):
    p, batch = mlp_params(), (normal(1, 3, 5, 4), labels(2, 3, 5))
    loss = lambda p, batch: mean_loss(mlp, "categorical", p, batch)
    stats = jk.value_grad_and_factors(loss, loss_terms=15)
    value, grads, factors = jax.jit(stats)(p, batch)
    np.testing.assert_allclose(value, loss(p, batch), rtol=1e-12)
    assert_tree_close(grads, jax.grad(loss)(p, batch), 1e-10)
    assert_factors_close(factors, oracle(mlp, p, batch), 1e-10)


@pytest.mark.slow
def test_key_reaches_dropout(x64):
    """The same key gives the dropped units of plain JAX; the oracle gets them as inputs."""

    def with_keep(p, inputs, tap):
        x, keep = inputs
        h = jnp.tanh(tap.dense("w", x, x @ p["w"]))
        h = jnp.where(keep, h / 0.5, 0.0)
        return tap.dense("v", h, h @ p["v"])

    def apply_fn(p, x, key):
        keep = jax.random.bernoulli(key, 0.5, (x.shape[0], 5))
        return with_keep(p, (x, keep), PLAIN)

    p, x, y, key = tree(35, w=(4, 5), v=(5, 3)), normal(1, 4, 4), labels(2, 4), jax.random.key(7)
    objective = jk.Objective(apply_fn, jk.Categorical())
    value, grads, factors = jax.jit(jk.value_grad_and_factors(objective))(p, (x, y), key=key)
    keep = jax.random.bernoulli(key, 0.5, (4, 5))
    expected = jax.value_and_grad(lambda p: mean_loss(with_keep, "categorical", p, ((x, keep), y)))(
        p
    )
    assert_tree_close((value, grads), expected, 1e-10)
    assert_factors_close(factors, oracle(with_keep, p, ((x, keep), y)), 1e-10)


@pytest.mark.slow
def test_labels_are_sampled_apart_from_the_models_own_randomness(x64):
    def apply_fn(p, x, key):
        keep = jax.random.bernoulli(key, 0.5, x.shape)
        return jnp.where(keep, x, 0.0) @ p["w"]

    p, batch = tree(36, w=(4, 3)), (normal(1, 4, 4), labels(2, 4))
    objective = jk.Objective(apply_fn, jk.Categorical())
    key = jax.random.key(5)
    mc = jk.value_grad_and_factors(objective, fisher="mc")(p, batch, key=key)
    empirical = jk.value_grad_and_factors(objective)(p, batch, key=key)
    np.testing.assert_array_equal(mc[0], empirical[0])  # same dropout under either Fisher
    np.testing.assert_allclose(mc[2]["w"].a, empirical[2]["w"].a, atol=1e-12)


def test_factor_shapes_computes_nothing_and_agrees(x64):
    p, batch = scanned_params(), (normal(1, 3, 5, 4), labels(2, 3, 5))
    stats = jk.value_grad_and_factors(objective_of(scanned))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (p, batch))
    like, factors = stats.factor_shapes(*shapes), stats(p, batch)[2]
    assert jax.tree.structure(like) == jax.tree.structure(factors)
    for want, have in zip(jax.tree.leaves(like), jax.tree.leaves(factors), strict=True):
        assert (want.shape, want.dtype) == (have.shape, have.dtype)


# ----------------------------------------------- independence of how it is run


@pytest.mark.exhaustive
def test_micro_batches_with_unequal_masks_add_up_to_the_whole(x64):
    p, x, y = attention_params(), normal(1, 4, 4, 4), labels(2, 4, 4)
    mask = jnp.asarray(np.arange(4) < np.array([[4], [1], [3], [2]]))
    stats = jax.jit(jk.value_grad_and_factors(objective_of(attention)))
    whole = stats(p, (x, y, mask), positions=mask)[2]
    parts = [
        stats(p, (x[i], y[i], mask[i]), positions=mask[i])[2] for i in (slice(0, 1), slice(1, 4))
    ]
    assert_tree_close(parts[0] + parts[1], whole, 1e-12)
    for name in whole:
        for pooled, one in zip((parts[0] + parts[1])[name], whole[name], strict=True):
            np.testing.assert_allclose(pooled, one, atol=1e-12)


def test_scan_equals_unrolled_equals_remat_equals_no_jit(x64):
    p, batch = scanned_params(), (normal(1, 3, 5, 4), labels(2, 3, 5))

    def by_scan(remat):
        def model(p, x, tap):
            step = lambda x, w: (x + jnp.tanh(x @ w["kernel"] + w["bias"]), None)
            x, _ = lax.scan(jax.checkpoint(step) if remat else step, x, p["blocks"])
            return x @ p["head"]

        return model

    results = [
        (jax.jit if jit else lambda f: f)(jk.value_grad_and_factors(objective_of(model)))(p, batch)
        for model in (scanned, by_scan(True), by_scan(False))
        for jit in (True, False)
    ]
    for other in results[1:]:
        assert_tree_close(other, results[0], 1e-12)


def test_unrolled_slices_of_a_stacked_parameter_are_named_by_index(x64):
    p, batch = scanned_params(), (normal(1, 3, 5, 4), labels(2, 3, 5))
    *_, factors = jk.value_grad_and_factors(objective_of(unrolled))(p, batch)
    expected = oracle(unrolled, p, batch)
    assert set(factors) == {"head", *(f"blocks/kernel[{i}]" for i in range(3))}
    for i in range(3):
        np.testing.assert_allclose(
            factors[f"blocks/kernel[{i}]"].a, expected["blocks/kernel"].a[i], atol=1e-10
        )
        np.testing.assert_allclose(
            factors[f"blocks/kernel[{i}]"].g, expected["blocks/kernel"].g[i], atol=1e-10
        )


@pytest.mark.exhaustive
def test_batch_size_may_change_between_calls(x64):
    stats = jk.value_grad_and_factors(objective_of(mlp))
    for n in (2, 5):
        batch = (normal(1, n, 4), labels(2, n))
        assert_factors_close(stats(mlp_params(), batch)[2], oracle(mlp, mlp_params(), batch), 1e-10)


# ------------------------------------------------------------------ precision


@pytest.mark.slow
def test_bfloat16_compute_accumulates_in_float32():
    """bf16 rounds at 2^-8 = 0.4%; a and g pass through a few roundings each, so entries of
    the factors stay within 3% of the largest entry of the float32 oracle's.
    """
    with jax.enable_x64(False):
        p = jax.tree.map(lambda x: x.astype(jnp.float32), mlp_params())

        def model(p, x, tap):
            p, x = jax.tree.map(lambda v: v.astype(jnp.bfloat16), (p, x))
            return mlp(p, x, tap).astype(jnp.float32)

        batch = (normal(1, 64, 4).astype(jnp.float32), labels(2, 64).astype(jnp.int32))
        value, grads, factors = jax.jit(jk.value_grad_and_factors(objective_of(model)))(p, batch)
        expected = oracle(mlp, p, batch)
        for name, block in expected.items():
            for side in ("a", "g"):
                found = getattr(factors[name], side)
                assert found.dtype == jnp.float32
                want = getattr(block, side)
                assert np.abs(np.asarray(found) - want).max() <= 0.03 * np.abs(want).max()
        gradient = jax.jit(jax.grad(objective_of(model)))(p, batch)
        assert_tree_close(grads, gradient, 1e-6)


@pytest.mark.exhaustive
def test_float32_factors_are_within_rounding_of_the_oracle():
    with jax.enable_x64(False):
        p = jax.tree.map(lambda x: x.astype(jnp.float32), attention_params())
        batch = (normal(1, 3, 4, 4).astype(jnp.float32), labels(2, 3, 4).astype(jnp.int32))
        check(attention, p, batch, tolerance=1e-5)
