import dataclasses
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkfac._errors import UncoveredParameterError, UnknownLayerError
from jaxkfac.blocks._random_factors_test import layer, random_factors
from jaxkfac.curvature import (
    apply_power,
    eigendecompose,
    fisher_vector_product,
    identity_bases,
    natural_gradient,
)
from jaxkfac.linalg.spectral import check_damping

DENSE = (layer("w", (3, 4), bias="b"), layer("u", (4, 2)))
STACKED = (layer("s", (2, 3, 4), bias="sb", stack=1),)
SCALE = (layer("scale", (2, 4), kind="scale", stack=1, inputs=(), g_dense=False),)
# a DenseGeneral kernel (out, in, in) whose inputs come last, and an embedding
SWAPPED = (layer("general", (4, 3, 2), inputs=(1, 2)),)
TABLE = (layer("table", (5, 3), kind="embedding", a_dense=False),)
ALL = DENSE + STACKED + SCALE + SWAPPED + TABLE


pytestmark = pytest.mark.usefixtures("x64")


def tree_for(layers, seed=0, dtype=None):
    shapes = {m.path: m.atoms for x in layers for m in (x.weight, x.bias) if m is not None}
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return {
        p: jax.random.normal(k, s, dtype) for k, (p, s) in zip(keys, shapes.items(), strict=True)
    }


def setup(layers, bias="joint", **kwargs):
    factors = random_factors(layers, jax.random.key(1), bias=bias)
    return tree_for(layers), factors, eigendecompose(factors, max_condition=jnp.inf, **kwargs)


def assert_trees_close(a, b, tol=1e-10):
    assert a.keys() == b.keys()
    for path in a:
        assert a[path].dtype == b[path].dtype and a[path].shape == b[path].shape
        assert jnp.allclose(a[path], b[path], rtol=tol, atol=tol), path


def dense_power(block, power):
    values, vectors = jnp.linalg.eigh(block)
    return (vectors * values**power) @ vectors.T


def dense_block(a, g, damping, mode):
    eye_a, eye_g = jnp.eye(len(a)), jnp.eye(len(g))
    if isinstance(damping, tuple):
        return jnp.kron(a + damping[0] * eye_a, g + damping[1] * eye_g)
    if mode == "exact":
        return jnp.kron(a, g) + damping * jnp.eye(len(a) * len(g))
    pi = jnp.sqrt(jnp.trace(a) / len(a) * len(g) / jnp.trace(g)) if mode == "pi" else 1.0
    root = jnp.sqrt(damping)
    return jnp.kron(a + pi * root * eye_a, g + root / pi * eye_g)


MODES = [("exact", 0.3), ("factored", 0.3), ("pi", 0.3), ("pi", (0.2, 0.7))]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("power", [-1.0, -0.5, 1.0])
@pytest.mark.parametrize(("mode", "damping"), MODES)
def test_joint_bias_is_the_last_row_of_the_dense_block(mode, damping, power):
    tree, factors, bases = setup(DENSE)
    got = apply_power(tree, bases, power, damping, mode)
    block = dense_power(dense_block(*factors["w"], damping, mode), power)
    rows = jnp.concatenate([tree["w"], tree["b"][None]])
    expected = (block @ rows.reshape(-1)).reshape(4, 4)
    u = dense_power(dense_block(*factors["u"], damping, mode), power) @ tree["u"].reshape(-1)
    assert_trees_close(got, {"w": expected[:-1], "b": expected[-1], "u": u.reshape(4, 2)})


@pytest.mark.default(1, slow=0)
@pytest.mark.parametrize("damping", [0.3, (0.2, 0.7)])
def test_separate_bias_has_the_block_g(damping):
    tree, factors, bases = setup(DENSE, bias="separate")
    got = apply_power(tree, bases, -1.0, damping)
    w = jnp.linalg.solve(dense_block(*factors["w"], damping, "exact"), tree["w"].reshape(-1))
    delta = damping[1] if isinstance(damping, tuple) else damping
    b = jnp.linalg.solve(factors["w"].g + delta * jnp.eye(4), tree["b"])
    assert_trees_close({k: got[k] for k in "wb"}, {"w": w.reshape(3, 4), "b": b})


@pytest.mark.exhaustive
def test_stacked_layer_is_one_block_per_slice():
    tree, factors, bases = setup(STACKED)
    got = apply_power(tree, bases, -1.0, 0.3, "pi")
    for i in range(2):
        a, g = (side[i] for side in factors["s"])
        rows = jnp.concatenate([tree["s"][i], tree["sb"][i][None]])
        expected = jnp.linalg.solve(dense_block(a, g, 0.3, "pi"), rows.reshape(-1)).reshape(4, 4)
        assert_trees_close(
            {"s": got["s"][i], "sb": got["sb"][i]}, {"s": expected[:-1], "sb": expected[-1]}
        )


@pytest.mark.slow
def test_swapped_axes_and_diagonal_sides():
    tree, factors, bases = setup(SWAPPED + TABLE + SCALE)
    got = natural_gradient(tree, bases, damping=0.3)
    matrix = tree["general"].reshape(4, 6).T
    solved = jnp.linalg.solve(dense_block(*factors["general"], 0.3, "exact"), matrix.reshape(-1))
    a, g = factors["table"]
    table = jnp.linalg.solve(dense_block(jnp.diag(a), g, 0.3, "exact"), tree["table"].reshape(-1))
    expected = {
        "general": solved.reshape(6, 4).T.reshape(4, 3, 2),
        "table": table.reshape(5, 3),
        "scale": tree["scale"] / (factors["scale"].diagonal + 0.3),
    }
    assert_trees_close(got, expected)


@pytest.mark.exhaustive
@given(power=st.floats(-2, 2), damping=st.floats(0.05, 2), mode=st.sampled_from(["exact", "pi"]))
@settings(max_examples=12, deadline=None)
def test_any_real_power_is_that_of_the_dense_block(power, damping, mode):
    tree, factors, bases = setup(DENSE)
    got = apply_power(tree, bases, power, damping, mode)
    block = dense_power(dense_block(*factors["w"], damping, mode), power)
    expected = block @ jnp.concatenate([tree["w"], tree["b"][None]]).reshape(-1)
    assert_trees_close(
        {k: got[k] for k in "wb"},
        {"w": expected.reshape(4, 4)[:-1], "b": expected.reshape(4, 4)[-1]},
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("bias", ["joint", "separate"])
@pytest.mark.parametrize(("mode", "damping"), MODES)
def test_the_damped_inverse_undoes_the_damped_fisher(mode, damping, bias):
    tree, _, bases = setup(ALL, bias=bias)
    there = apply_power(tree, bases, 1.0, damping, mode)
    assert not jnp.allclose(there["w"], tree["w"], rtol=0.1)
    assert_trees_close(natural_gradient(there, bases, damping=damping, damping_mode=mode), tree)


def rank_deficient(bias="joint"):
    """Factors with a null space and, from repeated rows, with repeated eigenvalues."""
    factors = random_factors(ALL, jax.random.key(2), bias=bias, rows=2)
    tied = jnp.diag(jnp.array([0.0, 1.0, 1.0, 2.0]))
    return dataclasses.replace(factors, g_sums={**factors.g_sums, "w": tied})


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("power", [-2.0, -1.0, -0.5, 0.5, 1.0])
def test_a_cut_is_the_pseudo_inverse_of_the_dense_block(power):
    factors, tree, cut = rank_deficient(), tree_for(ALL), 1e-3
    bases = eigendecompose(factors, max_condition=jnp.inf)
    got = apply_power(tree, bases, power, cut=cut)
    for name in ("w", "u"):
        block = jnp.kron(*factors[name])
        values, vectors = jnp.linalg.eigh(block)
        kept = values > cut * values.max()
        assert 0 < int(kept.sum()) < len(values)
        powered = jnp.where(kept, jnp.where(kept, values, 1) ** power, 0)
        dense = (vectors * powered) @ vectors.T
        if power == -1.0:
            pinv = jnp.linalg.pinv(block, rtol=cut, hermitian=True)
            assert jnp.allclose(dense, pinv, rtol=1e-9, atol=1e-9 * float(jnp.abs(pinv).max()))
        rows = [tree["w"], tree["b"][None]] if name == "w" else [tree["u"]]
        expected = (dense @ jnp.concatenate(rows).reshape(-1)).reshape(
            -1, block.shape[0] // len(factors[name].a)
        )
        result = jnp.concatenate([got["w"], got["b"][None]] if name == "w" else [got["u"]])
        assert jnp.allclose(result, expected, rtol=1e-9, atol=1e-9 * float(jnp.abs(expected).max()))
    diagonal = factors["scale"].diagonal
    kept = diagonal > cut * diagonal.max(-1, keepdims=True)
    assert jnp.allclose(got["scale"], jnp.where(kept, diagonal**power, 0) * tree["scale"])


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("mode", "damping"), MODES)
def test_what_is_cut_stays_out_whatever_the_clipping_and_the_damping(mode, damping):
    factors, tree = rank_deficient("separate"), tree_for(ALL)
    raw, clipped = (eigendecompose(factors, max_condition=k) for k in (jnp.inf, 2.0))
    there = apply_power(tree, raw, 0.0, cut=1e-3)  # the projection on what is kept
    again = apply_power(there, raw, 0.0, cut=1e-3)
    assert_trees_close(again, there)
    assert not jnp.allclose(there["w"], tree["w"], rtol=0.1)
    assert not jnp.allclose(there["b"], tree["b"], rtol=0.1)
    for bases in (raw, clipped):
        got = apply_power(tree, bases, -1.0, damping, mode, cut=1e-3)
        projected = apply_power(there, bases, -1.0, damping, mode, cut=1e-3)
        uncut = apply_power(there, bases, -1.0, damping, mode)
        assert_trees_close(got, projected)
        assert_trees_close(got, uncut)  # what is kept is not changed by the cut


@pytest.mark.slow
def test_a_cut_takes_each_slice_of_a_stack_by_itself():
    factors = random_factors(STACKED, jax.random.key(3))
    scaled = {"s": factors.g_sums["s"] * jnp.array([1.0, 1e-6])[:, None, None]}
    bases = eigendecompose(dataclasses.replace(factors, g_sums=scaled), max_condition=jnp.inf)
    ratio = float(factors["s"].g.shape[-1])
    tree = tree_for(STACKED)
    kept = apply_power(tree, bases, -1.0, cut=1e-3 / ratio)
    assert all(bool(jnp.abs(x[1]).max() > 0) for x in kept.values())


@pytest.mark.exhaustive
def test_a_cut_makes_zero_of_a_zero_factor_and_nan_of_nan():
    factors = random_factors(ALL, jax.random.key(1))
    tree = tree_for(ALL)
    nothing = eigendecompose(jax.tree.map(jnp.zeros_like, factors))
    got = natural_gradient(tree, nothing, damping=0.5, cut=1e-6)
    assert_trees_close(got, {k: 0 * v for k, v in tree.items()})
    bad = {**factors.g_sums, "w": factors.g_sums["w"].at[0, 0].set(jnp.nan)}
    bases = eigendecompose(dataclasses.replace(factors, g_sums=bad), placement="device")
    got = natural_gradient(tree, bases, damping=0.5, cut=1e-6)
    assert jnp.isnan(got["w"]).all() and jnp.isnan(got["b"]).all()
    assert jnp.isfinite(got["u"]).all()


@pytest.mark.slow
def test_power_minus_one_inverts_power_one():
    tree, _, bases = setup(ALL)
    back = apply_power(fisher_vector_product(tree, bases), bases, -1.0)
    assert_trees_close(back, tree, 1e-9)
    assert not jnp.allclose(fisher_vector_product(tree, bases)["w"], tree["w"], rtol=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("bias", ["joint", "separate"])
def test_two_half_powers_are_the_fisher(bias):
    tree, _, bases = setup(ALL, bias=bias)
    half = apply_power(apply_power(tree, bases, 0.5), bases, 0.5)
    assert_trees_close(half, fisher_vector_product(tree, bases), 1e-9)


def test_positive_powers_read_raw_values_and_negative_ones_clipped_values():
    factors = random_factors(ALL, jax.random.key(1))
    raw = eigendecompose(factors, max_condition=jnp.inf)
    clipped = eigendecompose(factors, max_condition=1.2)
    tree = tree_for(ALL)
    assert_trees_close(fisher_vector_product(tree, raw), fisher_vector_product(tree, clipped))
    inverse, limited = (natural_gradient(tree, b, damping=0.0) for b in (raw, clipped))
    assert all(float(jnp.abs(inverse[k]).sum() - jnp.abs(limited[k]).sum()) > 0.01 for k in tree)


@pytest.mark.slow
def test_undamped_inverse_of_rank_deficient_factors_is_finite_and_small():
    factors = random_factors(DENSE, jax.random.key(2), rows=1)
    tree = tree_for(DENSE)
    clipped = natural_gradient(tree, eigendecompose(factors), damping=0.0)
    assert all(bool(jnp.isfinite(x).all()) for x in clipped.values())
    nothing = eigendecompose(jax.tree.map(jnp.zeros_like, factors))
    assert_trees_close(
        natural_gradient(tree, nothing, damping=0.0), {k: 0 * v for k, v in tree.items()}
    )
    assert_trees_close(
        natural_gradient(tree, nothing, damping=0.5), {k: 2 * v for k, v in tree.items()}
    )


def test_identity_bases_without_damping_change_nothing():
    for bias in ("joint", "separate"):
        factors = random_factors(ALL, jax.random.key(1), bias=bias)
        tree = tree_for(ALL)
        assert_trees_close(natural_gradient(tree, identity_bases(factors), damping=0.0), tree)


def test_slices_of_a_parameter_are_preconditioned_each_by_its_own_layer():
    whole = random_factors(STACKED, jax.random.key(3))
    layers = tuple(layer("s", (3, 4), name=f"s[{i}]", bias="sb", index=(i,)) for i in range(2))
    factors = random_factors(layers, jax.random.key(3))
    for i in range(2):
        factors.a_sums[f"s[{i}]"] = whole.a_sums["s"][i]
        factors.g_sums[f"s[{i}]"] = whole.g_sums["s"][i]
    tree = tree_for(STACKED)
    got = natural_gradient(tree, eigendecompose(factors), damping=0.1)
    assert_trees_close(got, natural_gradient(tree, eigendecompose(whole), damping=0.1))


def test_slices_that_no_layer_covers_follow_missing():
    layers = (layer("s", (3, 4), name="s[1]", index=(1,)),)
    bases = eigendecompose(random_factors(layers, jax.random.key(3)))
    tree = {"s": tree_for(STACKED)["s"]}
    with pytest.raises(UncoveredParameterError, match="'s'"):
        natural_gradient(tree, bases, damping=0.1)
    kept = natural_gradient(tree, bases, damping=0.1, missing="identity")["s"]
    zeroed = natural_gradient(tree, bases, damping=0.1, missing="zero")["s"]
    assert jnp.array_equal(kept[0], tree["s"][0]) and not zeroed[0].any()
    assert jnp.array_equal(kept[1], zeroed[1]) and not jnp.allclose(kept[1], tree["s"][1])


def test_missing_leaves_are_named_kept_or_zeroed():
    tree, _, bases = setup(DENSE)
    extra = {**tree, "lone": jnp.ones(2), "step": jnp.arange(2)}
    with pytest.raises(UncoveredParameterError, match="'lone'") as error:
        natural_gradient(extra, bases, damping=0.1)
    assert "step" not in str(error.value)
    covered = natural_gradient(tree, bases, damping=0.1)
    for missing, lone in (("identity", jnp.ones(2)), ("zero", jnp.zeros(2))):
        got = natural_gradient(extra, bases, damping=0.1, missing=missing)
        assert_trees_close(got, {**covered, "lone": lone, "step": jnp.arange(2)})


def test_layers_absent_from_the_tree_are_named_or_passed_over():
    tree, _, bases = setup(DENSE)
    full = natural_gradient({**tree, "b": jnp.zeros(4)}, bases, damping=0.1)
    with pytest.raises(UnknownLayerError, match="no leaf 'b'"):
        natural_gradient({"w": tree["w"], "u": tree["u"]}, bases, damping=0.1)
    some = natural_gradient({"w": tree["w"]}, bases, damping=0.1, missing="identity")
    assert_trees_close(some, {"w": full["w"]})
    other = natural_gradient({"u": tree["u"]}, bases, damping=0.1, missing="zero")
    assert_trees_close(other, {"u": full["u"]})


@pytest.mark.default(1, slow=0)
@pytest.mark.parametrize("embedding_first", [True, False])
def test_tied_embedding_and_head_use_the_head(embedding_first):
    embedding = layer("e", (5, 3), name="e", kind="embedding", a_dense=False)
    head = layer("e", (5, 3), name="e@transposed", inputs=(1,))
    layers = (embedding, head) if embedding_first else (head, embedding)
    factors = random_factors(layers, jax.random.key(4))
    tree = tree_for((embedding,))
    got = natural_gradient(tree, eigendecompose(factors), damping=0.2)["e"]
    block = dense_block(*factors["e@transposed"], 0.2, "exact")
    assert jnp.allclose(got, jnp.linalg.solve(block, tree["e"].T.reshape(-1)).reshape(3, 5).T)


@pytest.mark.slow
def test_bias_of_a_layer_whose_weight_belongs_to_another_is_still_written():
    first, second = layer("w", (3, 3)), layer("w", (3, 3), name="w@again", bias="b")
    factors = random_factors((first, second), jax.random.key(5))
    tree = tree_for((first, second))
    got = natural_gradient(tree, eigendecompose(factors), damping=0.2)
    w = jnp.linalg.solve(dense_block(*factors["w"], 0.2, "exact"), tree["w"].reshape(-1))
    rows = jnp.concatenate([tree["w"], tree["b"][None]])
    b = jnp.linalg.solve(dense_block(*factors["w@again"], 0.2, "exact"), rows.reshape(-1))[-3:]
    assert_trees_close(got, {"w": w.reshape(3, 3), "b": b})


def test_arithmetic_is_in_the_factors_dtype_and_the_result_in_the_leafs():
    tree, _, bases = setup(DENSE)
    half = {k: v.astype(jnp.bfloat16) for k, v in tree.items()}
    got = natural_gradient(half, bases, damping=0.1)
    exact = natural_gradient(
        {k: v.astype(jnp.float64) for k, v in half.items()}, bases, damping=0.1
    )
    assert_trees_close(got, {k: v.astype(jnp.bfloat16) for k, v in exact.items()}, 0.0)


@pytest.mark.slow
def test_jit_with_traced_damping_agrees_with_eager():
    tree, _, bases = setup(ALL)
    jitted = jax.jit(lambda t, b, d: natural_gradient(t, b, damping=(d, d)))
    assert_trees_close(jitted(tree, bases, 0.3), natural_gradient(tree, bases, damping=(0.3, 0.3)))


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("power", [-2.0, -1.0, -0.5, 0.5, 1.0])
@pytest.mark.parametrize("cut", [0.0, 1e-3])
def test_eigenvalues_of_zero_give_zero_and_finite_gradients_at_every_power(power, cut):
    tree, factors, _ = setup(DENSE)
    zero = eigendecompose(jax.tree.map(jnp.zeros_like, factors))

    def total(tree, bases):
        return sum(x.sum() for x in apply_power(tree, bases, power, cut=cut).values())

    assert float(total(tree, zero)) == 0
    for slopes in jax.grad(total, argnums=(0, 1))(tree, zero):
        assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(slopes))


def test_the_slope_in_the_damping_is_that_of_the_inverse():
    tree, factors, _ = setup(DENSE)
    zero = jax.tree.map(jnp.zeros_like, eigendecompose(factors, max_condition=jnp.inf))
    zero = dataclasses.replace(zero, a=identity_bases(factors).a)
    bases = dataclasses.replace(zero, g=identity_bases(factors).g)
    slope = jax.grad(lambda d: natural_gradient(tree, bases, damping=d)["w"].sum())(0.5)
    assert jnp.allclose(slope, -tree["w"].sum() / 1.5**2, rtol=1e-12)


INDEXED = tuple(layer("w", (3, 4), name=f"w[{i}]", index=(i,), input=f"w[{i}]") for i in range(2))
INDEXED_SCALE = tuple(
    layer("s", (4,), name=f"s[{i}]", kind="scale", inputs=(), index=(i,)) for i in range(2)
)


def test_gradients_may_be_numpy_arrays():
    tree, _, bases = setup(ALL + INDEXED + INDEXED_SCALE)
    tree = tree | {"w": jnp.stack([tree["w"]] * 2), "s": jnp.stack([tree["s"]] * 2)}
    layers = tuple(x for x in bases.layers if x.name not in ("w", "s"))
    bases = dataclasses.replace(bases, layers=layers)
    tree.pop("b"), tree.pop("sb")
    got = natural_gradient({k: np.asarray(x) for k, x in tree.items()}, bases, damping=0.1)
    assert_trees_close(got, natural_gradient(tree, bases, damping=0.1), 0.0)


@pytest.mark.parametrize(
    "path, shape",
    [
        ("w", (4, 3)),
        ("w", (3, 5)),
        ("b", (5,)),
        ("table", (5,)),
        ("scale", (4, 2)),
        ("s", (4, 3, 2)),
    ],
)
def test_a_gradient_of_another_shape_than_its_parameter_is_named(path, shape):
    tree, _, bases = setup(ALL)
    with pytest.raises(ValueError, match=rf"'{path}' has shape {re.escape(str(shape))}, which is"):
        natural_gradient(tree | {path: jnp.ones(shape)}, bases, damping=0.1)


def test_bad_arguments_are_named():
    tree, factors, bases = setup(DENSE)
    with pytest.raises(ValueError, match="damping must be zero or positive, got -0.1"):
        natural_gradient(tree, bases, damping=-0.1)
    with pytest.raises(ValueError, match="damping_mode must be one of"):
        check_damping(0.1, "both")  # below the runtime type hook of natural_gradient
    with pytest.raises(ValueError, match="cut must be in"):
        natural_gradient(tree, bases, damping=0.1, cut=1.0)
    with pytest.raises(ValueError, match="vectors=True"):
        natural_gradient(tree, eigendecompose(factors, vectors=False), damping=0.1)


def small_factors(bias="joint"):
    """Of rows and gradients of size 1e-11, in float32, which cannot hold their fourth power."""
    layers = DENSE + STACKED + SWAPPED + TABLE
    factors = random_factors(layers, jax.random.key(1), bias=bias, dtype=jnp.float32)
    shrink = lambda sums: {name: x * 1e-22 for name, x in sums.items()}
    return dataclasses.replace(
        factors, a_sums=shrink(factors.a_sums), g_sums=shrink(factors.g_sums)
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("bias", ["joint", "separate"])
@pytest.mark.parametrize("power", [-1.0, -0.5])
@pytest.mark.parametrize(
    ("damping", "mode"),
    [(0.0, "exact"), (1e-37, "exact"), (1e-37, "factored"), (1e-37, "pi"), ((1e-23, 1e-22), "pi")],
)
def test_products_of_eigenvalues_below_the_smallest_float32_are_not_lost(
    bias, power, damping, mode
):
    factors = small_factors(bias)
    tree = {k: (1e-22 * x).astype(jnp.float32) for k, x in tree_for(factors.layers).items()}
    double = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float64), tree)
    got = apply_power(tree, eigendecompose(factors), power, damping, mode)
    wanted = apply_power(double(tree), eigendecompose(double(factors)), power, damping, mode)
    for path, exact in wanted.items():
        size = jnp.abs(exact).max()
        assert size > 0 and got[path].dtype == jnp.float32
        assert jnp.abs(double(got[path]) - exact).max() < 1e-3 * size, path


@pytest.mark.exhaustive
def test_a_damping_far_above_the_eigenvalues_is_a_plain_division():
    factors = small_factors()
    tree = {k: x.astype(jnp.float32) for k, x in tree_for(factors.layers).items()}
    for damping in (1e-3, 1e20):
        solved = natural_gradient(tree, eigendecompose(factors), damping=damping)
        for path in tree:
            assert jnp.allclose(solved[path] * damping, tree[path], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("missing", ["identity", "zero"])
def test_a_tree_of_another_model_is_a_warning_outside_jit(missing):
    tree, _, bases = setup(DENSE)
    other = {f"net/{path}": x for path, x in tree.items()}
    options = {"damping": 0.1, "missing": missing}
    with pytest.warns(UserWarning, match="none of the layers .* first is 'w'.*'net/w'.*pass the"):
        natural_gradient(other, bases, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.jit(lambda tree: natural_gradient(tree, bases, **options))(other)
        natural_gradient({"b": tree["b"]}, bases, **options)


def test_a_stack_with_vectors_of_fewer_bits_is_solved_slice_by_slice():
    tree, _, bases = setup(STACKED)
    narrow = lambda side: {
        name: x._replace(vectors=x.vectors.astype(jnp.float32)) for name, x in side.items()
    }
    bases = dataclasses.replace(bases, a=narrow(bases.a), g=narrow(bases.g))
    got = natural_gradient(tree, bases, damping=0.3)
    for i in range(2):
        basis = bases["s"]
        left, right = (x[i].astype(float) for x in (basis.a_vectors, basis.g_vectors))
        values = jnp.outer(basis.a_values[i], basis.g_values[i]) + 0.3
        rows = jnp.concatenate([tree["s"][i], tree["sb"][i][None]])
        expected = left @ (left.T @ rows @ right / values) @ right.T
        found = jnp.concatenate([got["s"][i], got["sb"][i][None]])
        np.testing.assert_allclose(found, expected, rtol=1e-10)
