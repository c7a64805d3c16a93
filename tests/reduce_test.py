"""Reduce: the mean input row and the summed gradient row of every example, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkfac as jk
from tests._cases import CASES, case
from tests._checks import assert_block_close, assert_factors_close, check, objective_of
from tests._oracle import oracle
from tests._programs import attention, attention_params, labels, mlp, mlp_params, normal, tree
from tests._taps import PLAIN

pytestmark = pytest.mark.exhaustive  # minutes for the file; make test-exhaustive


@pytest.mark.parametrize("name", CASES)
def test_layer_kinds_have_the_factors_of_the_brute_force(x64, name):
    model, plain, params, batch = case(name)
    check(model, params, batch, oracle_model=plain, sharing="reduce")


@pytest.mark.parametrize("name", ["rows", "scan", "shared layers", "experts", "uneven uses"])
def test_separate_bias(x64, name):
    model, plain, params, batch = case(name)
    check(model, params, batch, oracle_model=plain, sharing="reduce", bias="separate")


def _here(s=3):
    return jnp.asarray(np.arange(s) < np.array([[s], [2], [1]]))


@pytest.mark.parametrize("name", ["rows", "attention", "scan", "shared layers", "experts"])
def test_means_are_over_the_positions_that_exist(x64, name):
    model, plain, params, batch = case(name)
    here = _here()
    mask = here & jnp.asarray(np.random.default_rng(7).random(here.shape) < 0.8).at[:, 0].set(True)
    batch = (*batch, mask)
    check(model, params, batch, oracle_model=plain, sharing="reduce", positions=here)


def test_the_ones_column_is_a_mean_of_ones_under_padding(x64):
    stats = jk.value_grad_and_factors(objective_of(mlp), sharing="reduce")
    batch, here = (normal(1, 3, 3, 4), labels(2, 3, 3)), _here()
    a = stats(mlp_params(), batch, positions=here)[2]["up/kernel"].a
    np.testing.assert_allclose(a[-1, -1], 1.0, rtol=1e-12)


def test_padding_may_hold_nan(x64):
    here = _here()
    clean = normal(1, 3, 3, 4)
    x = jnp.where(here[..., None], clean, jnp.nan)
    stats = jk.value_grad_and_factors(objective_of(mlp), sharing="reduce")
    *_, factors = stats(mlp_params(), (x, labels(2, 3, 3), here), positions=here)
    zeroed = jnp.where(here[..., None], clean, 0.0)
    batch = (zeroed, labels(2, 3, 3), here)
    expected = oracle(mlp, mlp_params(), batch, sharing="reduce", positions=here)
    np.testing.assert_allclose(factors["up/kernel"].a, expected["up/kernel"].a, atol=1e-10)


def test_an_example_without_positions_is_no_row_of_a(x64):
    here = _here().at[1].set(False)
    batch = (normal(1, 3, 3, 4), labels(2, 3, 3), here)
    *_, factors = check(mlp, mlp_params(), batch, sharing="reduce", positions=here)
    np.testing.assert_allclose(factors["up/kernel"].a[-1, -1], 1.0, rtol=1e-12)


def test_one_position_reduces_to_expand(x64):
    batch = (normal(1, 4, 1, 4), labels(2, 4, 1))
    one, other = (
        jk.value_grad_and_factors(objective_of(attention), sharing=sharing)(
            attention_params(), batch
        )[2]
        for sharing in ("expand", "reduce")
    )
    for name in one:
        for x, y in zip(one[name], other[name], strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-13)


def test_expand_and_reduce_differ_where_rows_share_a_weight(x64):
    model, _, params, batch = case("rows")
    one, other = (
        jk.value_grad_and_factors(objective_of(model), sharing=sharing)(params, batch)[2]
        for sharing in ("expand", "reduce")
    )
    for side in ("a", "g"):
        x, y = (np.asarray(getattr(f["up/kernel"], side)) for f in (one, other))
        assert np.abs(x - y).max() > 0.05 * np.abs(x).max()


def test_marked_rows_leave_the_mean(x64):
    """Rows that the outputs do not have are named by the model."""

    def model(p, inputs, tap, mark=True):
        x, here = inputs
        x = jk.mark_rows(x, here) if mark else x
        h = jnp.tanh(tap.dense("w", x, x @ p["w"]))
        pooled = jnp.where(here[..., None], h, 0.0).sum(1)
        return tap.dense("v", pooled, pooled @ p["v"], positioned=False)

    here, p = _here(), tree(31, w=(4, 4), v=(4, 3))
    batch = ((normal(1, 3, 3, 4), here), labels(2, 3))
    stats = jk.value_grad_and_factors(objective_of(model), sharing="reduce")
    *_, factors = jax.jit(stats)(p, batch)
    plain = lambda p, x, tap: model(p, x, tap, mark=False)
    expected = oracle(plain, p, batch, sharing="reduce", positions=here)
    assert_factors_close(factors, expected, 1e-10)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_tied_embedding_expands_and_its_head_reduces(x64, sharing):
    def model(p, ids, tap):
        h = tap.embedding("embedding", ids, p["table"][ids], size=6)
        h = jnp.tanh(tap.dense("w", h, h @ p["w"]))
        h = jnp.cumsum(h, axis=1)
        return tap.dense("head", h, h @ p["table"].T)

    p = tree(11, table=(6, 4), w=(4, 4))
    batch = (labels(1, 3, 5, classes=6), labels(2, 3, 5, classes=6))
    *_, factors = jk.value_grad_and_factors(objective_of(model), sharing=sharing)(p, batch)
    expected = oracle(model, p, batch, sharing=sharing)
    tied = {layer.kind: layer.name for layer in factors.layers if layer.weight.path == "table"}
    assert_block_close(factors[tied["embedding"]], expected["embedding"], 1e-10)
    assert_block_close(factors[tied["dense"]], expected["head"], 1e-10)
    assert_block_close(factors["w"], expected["w"], 1e-10)


@pytest.mark.parametrize("spec", ["nsi,io->nso", "oi,nsi->nso", "sni,io->nso"])
def test_rows_follow_the_example_axis_not_its_place(x64, spec):
    def model(p, x, tap):
        w = p["w"] if "io" in spec else p["w"].T
        rows = jnp.swapaxes(x, 0, 1) if spec.startswith("s") else x
        first, second = (w, rows) if spec.startswith("oi") else (rows, w)
        y = jnp.einsum(spec, first, second)
        return jnp.cumsum(tap.dense("w", x, y), axis=1)

    check(model, tree(7, w=(4, 3)), (normal(1, 2, 5, 4), labels(2, 2, 5)), sharing="reduce")


def _one_example(p, x):
    return jnp.cumsum(jnp.tanh(x @ p["w"] + p["b"]), axis=0) @ p["v"]


def test_examples_under_vmap(x64):
    def model(p, x, tap):
        return jax.vmap(lambda x: _one_example(p, x))(x)

    def plain(p, x, tap):
        h = jnp.tanh(tap.dense("w", x, x @ p["w"] + p["b"], bias=True))
        h = jnp.cumsum(h, axis=1)
        return tap.dense("v", h, h @ p["v"])

    p = tree(46, w=(4, 5), b=(5,), v=(5, 3))
    check(model, p, (normal(1, 3, 2, 4), labels(2, 3, 2)), oracle_model=plain, sharing="reduce")


def test_a_loop_over_examples_raises(x64):
    """Sums over iterations would be sums over examples."""
    objective = objective_of(lambda p, x, tap: jax.lax.map(lambda x: _one_example(p, x), x))
    p, batch = tree(46, w=(4, 5), b=(5,), v=(5, 3)), (normal(1, 3, 2, 4), labels(2, 3, 2))
    jk.value_grad_and_factors(objective)(p, batch)
    with pytest.raises(jk.LostRowsError, match="vmap|examples"):
        jk.value_grad_and_factors(objective, sharing="reduce")(p, batch)


def test_rows_that_mix_examples_raise(x64):
    """No row belongs to one example any more, so there is no example's mean."""

    def model(p, x, tap):
        h = jnp.sort((x @ p["w"]).reshape(-1, 4), axis=0).reshape(x.shape)
        return h @ p["v"]

    p, batch = tree(47, w=(4, 4), v=(4, 3)), (normal(1, 3, 3, 4), labels(2, 3, 3))
    jk.value_grad_and_factors(objective_of(model))(p, batch)  # expand needs no examples
    with pytest.raises(jk.LostRowsError, match="w"):
        jk.value_grad_and_factors(objective_of(model), sharing="reduce")(p, batch)


def test_layers_are_reported_alike_under_either_sharing(x64):
    params, batch = attention_params(), (normal(1, 3, 4, 4), labels(2, 3, 4))
    expand, reduce = (
        jk.value_grad_and_factors(objective_of(attention), sharing=s).factor_shapes(params, batch)
        for s in ("expand", "reduce")
    )
    assert [layer.name for layer in expand.layers] == [layer.name for layer in reduce.layers]
    assert set(jk.find_layers(lambda p, x: attention(p, x, PLAIN), params, batch[0])) == set(reduce)
