"""Theorems about K-FAC, and everything that must leave the factors alone, in float64.

The factors themselves are held to the brute force elsewhere; here they are held to dense
Fisher matrices, which know nothing of layers or rows.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkfac as jk
from tests._cases import case
from tests._checks import assert_tree_close, objective_of, two_devices
from tests._dense import fisher_block, root_fisher
from tests._likelihoods import mean_loss
from tests._programs import attention, attention_params, labels, mlp, mlp_params, normal, tree

# Minutes for the file; make test-slow.
pytestmark = [pytest.mark.slow, pytest.mark.sampled(1)]

SHARINGS = ("expand", "reduce")
BIASES = ("joint", "separate")


def _factors(model, params, batch, *, likelihood="categorical", jit=True, call=None, **options):
    stats = jk.value_grad_and_factors(objective_of(model, likelihood), **options)
    return (jax.jit(stats) if jit else stats)(params, batch, **(call or {}))[2]


def _kronecker(factor):
    return np.kron(np.asarray(factor.a), np.asarray(factor.g))


# ------------------------------------------------------- equality with the GGN


def _deep_linear(pool):
    """Three layers without nonlinearity; under reduce the positions are averaged or mixed."""

    def model(p, x, tap):
        for name in ("w0", "w1", "w2"):
            y = x @ p[name]["kernel"] + p[name]["bias"]
            x = tap.dense(f"{name}/kernel", x, y, bias=True)
        return x.mean(axis=1) if pool else x

    return model


def _deep_linear_params():
    sizes = {"w0": (3, 4), "w1": (4, 2), "w2": (2, 3)}
    shapes = {f"{k}__kernel": v for k, v in sizes.items()}
    return tree(61, **shapes, **{f"{k}__bias": v[1:] for k, v in sizes.items()})


def _assert_equals_ggn(factors, root, bias):
    for name in ("w0", "w1", "w2"):
        kernel, paths = factors[f"{name}/kernel"], [f"{name}/kernel", f"{name}/bias"]
        if bias == "joint":
            np.testing.assert_allclose(
                _kronecker(kernel), fisher_block(root, *paths), rtol=1e-10, atol=1e-13
            )
        else:
            for path, block in zip(paths, (_kronecker(kernel), kernel.g), strict=True):
                np.testing.assert_allclose(block, fisher_block(root, path), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("sharing", SHARINGS)
def test_exact_factors_of_a_deep_linear_net_with_squared_error_are_its_ggn(x64, sharing, bias):
    """Expand where every position has its own term, reduce where the positions are averaged
    (Eschenhagen et al., 2023, Propositions 1 and 2).
    """
    model = _deep_linear(pool=sharing == "reduce")
    params, x = _deep_linear_params(), normal(1, 5, 3, 3, scale=1.0)
    y = normal(2, 5, 3) if sharing == "reduce" else normal(2, 5, 3, 3)
    factors = _factors(
        model, params, (x, y), likelihood="gaussian", fisher="exact", sharing=sharing, bias=bias
    )
    root = root_fisher(model, params, (x, y), likelihood="gaussian")
    _assert_equals_ggn(factors, root, bias)


@pytest.mark.parametrize("sharing", SHARINGS)
def test_the_other_sharing_is_not_the_ggn(x64, sharing):
    """The theorem's settings matter: averaged positions under expand, own terms under reduce."""
    model = _deep_linear(pool=sharing == "expand")
    params, x = _deep_linear_params(), normal(1, 5, 3, 3, scale=1.0)
    y = normal(2, 5, 3) if sharing == "expand" else normal(2, 5, 3, 3)
    factors = _factors(
        model, params, (x, y), likelihood="gaussian", fisher="exact", sharing=sharing
    )
    block = fisher_block(
        root_fisher(model, params, (x, y), likelihood="gaussian"), "w0/kernel", "w0/bias"
    )
    found = _kronecker(factors["w0/kernel"])
    assert np.abs(found - block).max() > 0.05 * np.abs(block).max()


def _here(n=5, s=3):
    return jnp.asarray(np.arange(s) < (1 + np.arange(n) % s)[:, None])


def test_expand_equals_the_ggn_under_padding(x64):
    """Padded positions leave A, and terms that do not count leave G, with their counts."""
    model, params, here = _deep_linear(pool=False), _deep_linear_params(), _here()
    batch = (normal(1, 5, 3, 3, scale=1.0), normal(2, 5, 3, 3), here)
    factors = _factors(
        model, params, batch, likelihood="gaussian", fisher="exact", call={"positions": here}
    )
    _assert_equals_ggn(factors, root_fisher(model, params, batch, likelihood="gaussian"), "joint")


def test_reduce_equals_the_ggn_under_padding(x64):
    """The mean over the positions that exist, marked by the model; one term per example."""
    linear, params, here = _deep_linear(pool=False), _deep_linear_params(), _here()

    def model(p, inputs, tap, mark=True):
        x, here = inputs
        y = linear(p, jk.mark_rows(x, here) if mark else x, tap)
        keep = here[..., None].astype(y.dtype)
        return (y * keep).sum(axis=1) / keep.sum(axis=1)

    batch = ((normal(1, 5, 3, 3, scale=1.0), here), normal(2, 5, 3))
    factors = _factors(
        model, params, batch, likelihood="gaussian", fisher="exact", sharing="reduce"
    )
    plain = lambda p, x, tap: model(p, x, tap, mark=False)
    _assert_equals_ggn(factors, root_fisher(plain, params, batch, likelihood="gaussian"), "joint")


@pytest.mark.parametrize("fisher", ["empirical", "exact"])
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("sharing", SHARINGS)
def test_factors_of_a_single_datum_are_its_fisher(x64, sharing, bias, fisher):
    """One example of one row with cross entropy: expectations of products of one thing."""
    params, batch = mlp_params(), (normal(1, 1, 4), labels(2, 1))
    factors = _factors(mlp, params, batch, fisher=fisher, sharing=sharing, bias=bias)
    root = root_fisher(mlp, params, batch, fisher=fisher)
    for name in ("up", "down"):
        paths = [f"{name}/kernel"] + ([f"{name}/bias"] if bias == "joint" else [])
        np.testing.assert_allclose(
            _kronecker(factors[f"{name}/kernel"]), fisher_block(root, *paths), rtol=1e-10,
            atol=1e-15,
        )  # fmt: skip


@pytest.mark.parametrize("read", [lambda w: 0.5 * w, lambda w: -w, lambda w: 1.0 - w])
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("sharing", SHARINGS)
def test_a_constant_times_a_weight_belongs_to_the_weight(x64, sharing, bias, read):
    """The block of W where the program reads c W, with its bias beside it."""

    def model(p, x, tap):
        return jnp.tanh(x @ read(p["w"]) + p["b"]) @ (p["v"] / np.sqrt(2.0))

    params, batch = tree(65, w=(4, 5), b=(5,), v=(5, 3)), (normal(1, 1, 4), labels(2, 1))
    factors = _factors(model, params, batch, sharing=sharing, bias=bias)
    root = root_fisher(model, params, batch, fisher="empirical")
    for name, paths in (("w", ("w", "b") if bias == "joint" else ("w",)), ("v", ("v",))):
        np.testing.assert_allclose(
            _kronecker(factors[name]), fisher_block(root, *paths), rtol=1e-10, atol=1e-15
        )
    if bias == "separate":
        np.testing.assert_allclose(factors["w"].g, fisher_block(root, "b"), rtol=1e-10, atol=1e-15)


def test_exact_blocks_of_scales_are_the_ggn_where_tokens_mix(x64):
    """A full block has no approximation in it; the shortcut's is another matrix."""
    model, _, params, batch = case("attention")
    block = fisher_block(root_fisher(model, params, batch), "norm")
    exact, short = (
        np.asarray(_factors(model, params, batch, fisher=f, scales="full_block")["norm"].g)
        for f in ("exact", "exact_if_terms_do_not_mix")
    )
    np.testing.assert_allclose(exact, block, rtol=1e-10, atol=1e-15)
    assert np.abs(short - block).max() > 0.05 * np.abs(block).max()


# ------------------------------------------------------------ scale of the loss


def test_terms_times_the_mean_fisher_is_the_fisher_of_the_summed_loss(x64):
    model, params = _deep_linear(pool=False), _deep_linear_params()
    batch = (normal(1, 2, 3, 3), normal(2, 2, 3, 3))
    factors = _factors(model, params, batch, likelihood="gaussian", fisher="exact")

    def summed(bias):
        p = params | {"w2": params["w2"] | {"bias": bias}}
        return 6 * mean_loss(model, "gaussian", p, batch)

    hessian = jax.hessian(summed)(params["w2"]["bias"])
    assert float(factors.terms) == 6
    np.testing.assert_allclose(factors.terms * factors["w2/kernel"].g, hessian, rtol=1e-10)
    np.testing.assert_allclose(factors.g_sums["w2/kernel"], hessian, rtol=1e-10)


def test_scaling_the_loss_scales_g_by_the_square_and_leaves_a_alone(x64):
    params, batch = mlp_params(), (normal(1, 3, 2, 4), labels(2, 3, 2))

    def scaled(c):
        loss = lambda p, b: c * mean_loss(mlp, "categorical", p, b)
        return jax.jit(jk.value_grad_and_factors(loss, loss_terms=6))(params, batch)[2]

    one, ten = scaled(1.0), scaled(10.0)
    for name in one:
        np.testing.assert_allclose(ten[name].a, one[name].a, rtol=1e-12)
        np.testing.assert_allclose(ten[name].g, 100 * one[name].g, rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize("sharing", SHARINGS)
def test_repeating_the_batch_doubles_sums_and_leaves_means(x64, sharing):
    model, _, params, batch = case("attention")
    twice = jax.tree.map(lambda x: jnp.concatenate([x, x]), batch)
    one, two = (_factors(model, params, b, fisher="exact", sharing=sharing) for b in (batch, twice))
    assert_tree_close(two, 2 * one, 1e-12)
    for name in one:
        for x, y in zip(one[name], two[name], strict=True):
            np.testing.assert_allclose(y, x, rtol=1e-10, atol=1e-15)


# ------------------------------------------------- what must not change anything

OPTIONS = {
    "reduce": {"sharing": "reduce"},
    "exact, reduce": {"fisher": "exact", "sharing": "reduce", "chunk": 2},
    "mc": {"fisher": "mc", "samples": 2},
    "full block": {"scales": "full_block"},
    "exact diagonal": {"scales": "exact_diagonal", "bias": "separate"},
}


def _labelled(options, targets):
    """Injected labels: a sampler would draw others for a part of the batch."""
    return {"labels": labels(9, 2, *targets.shape)} if options.get("fisher") == "mc" else {}


@pytest.mark.parametrize("options", list(OPTIONS))
def test_parts_of_the_batch_add_up_to_the_whole(x64, options):
    options = OPTIONS[options]
    params, x, y = attention_params(), normal(1, 4, 3, 4), labels(2, 4, 3)
    mask = jnp.asarray(np.arange(3) < np.array([[3], [1], [2], [2]]))
    drawn = _labelled(options, y)
    whole = _factors(attention, params, (x, y, mask), call={"positions": mask, **drawn}, **options)
    parts = [
        _factors(
            attention, params, (x[i], y[i], mask[i]),
            call={"positions": mask[i], **{k: v[:, i] for k, v in drawn.items()}}, **options,
        )
        for i in (slice(0, 1), slice(1, 4))
    ]  # fmt: skip
    assert_tree_close(parts[0] + parts[1], whole, 1e-12)


def _scanned(remat, unroll):
    """Blocks with a norm, so that scales and biases are stacked too."""

    def block(x, w):
        h = x - x.mean(-1, keepdims=True)
        h = h * w["scale"] + w["shift"]
        return x + jnp.cumsum(jnp.tanh(h @ w["kernel"]), axis=1), None

    def model(p, x, tap):
        body = jax.checkpoint(block) if remat else block
        x, _ = lax.scan(body, x, p["b"], unroll=unroll)
        return x @ p["head"]

    return model


@pytest.mark.parametrize("options", list(OPTIONS))
def test_scan_remat_unrolling_and_jit_change_nothing(x64, options):
    options = OPTIONS[options]
    p = tree(27, b__scale=(2, 4), b__shift=(2, 4), b__kernel=(2, 4, 4), head=(4, 3))
    batch = (normal(1, 3, 2, 4), labels(2, 3, 2))
    call = _labelled(options, batch[1])
    first, *others = [
        _factors(_scanned(remat, unroll), p, batch, jit=jit, call=call, **options)
        for remat, unroll, jit in [(False, 1, True), (True, 1, True), (True, 2, True)]
        + [(False, 1, False)]
    ]
    for other in others:
        assert_tree_close(other, first, 1e-12)


@pytest.mark.parametrize("options", list(OPTIONS))
def test_data_parallelism_changes_nothing(x64, options):
    options = OPTIONS[options]
    params, batch = attention_params(), (normal(1, 4, 3, 4), labels(2, 4, 3))
    call = _labelled(options, batch[1])
    one = _factors(attention, params, batch, call=call, **options)
    with two_devices() as devices:
        mesh = Mesh(np.array(devices), ("rows",))
        put = lambda x, *axes: jax.device_put(x, NamedSharding(mesh, P(*axes)))
        placed = jax.tree.map(lambda x: put(x, "rows"), batch)
        call = {name: put(value, None, "rows") for name, value in call.items()}
        two = _factors(attention, put(params), placed, call=call, **options)
    assert_tree_close(two, one, 1e-12)


@pytest.mark.parametrize("sharing", SHARINGS)
def test_the_order_of_examples_changes_nothing(x64, sharing):
    model, plain, params, (x, y) = case("shared layers")
    order = jnp.asarray([2, 0, 1])
    one, other = (
        _factors(model, params, batch, fisher="exact", sharing=sharing)
        for batch in ((x, y), (x[order], y[order]))
    )
    assert_tree_close(other, one, 1e-12)


@pytest.mark.parametrize("fisher", ["empirical", "exact"])
@pytest.mark.parametrize("sharing", SHARINGS)
def test_padding_to_a_longer_length_changes_nothing(x64, sharing, fisher):
    """A causal model, so that positions at the end reach no other."""

    def model(p, x, tap):
        h = jnp.cumsum(jnp.tanh(x @ p["w"] + p["b"]) * p["scale"], axis=1)
        return h @ p["v"]

    p = tree(62, w=(4, 5), b=(5,), scale=(5,), v=(5, 3))
    x, y, here = normal(1, 3, 3, 4), labels(2, 3, 3), _here(3)
    longer = (
        jnp.pad(x, ((0, 0), (0, 2), (0, 0)), constant_values=7.0),
        jnp.pad(y, ((0, 0), (0, 2))),
        jnp.pad(here, ((0, 0), (0, 2))),
    )
    one, other = (
        _factors(model, p, batch, sharing=sharing, fisher=fisher, call={"positions": batch[2]})
        for batch in ((x, y, here), longer)
    )
    assert_tree_close(other, one, 1e-12)


@pytest.mark.parametrize("sharing", SHARINGS)
def test_a_transposed_kernel_has_the_same_factors(x64, sharing):
    p, batch = tree(63, w=(4, 5), v=(5, 3)), (normal(1, 3, 2, 4), labels(2, 3, 2))
    turned = p | {"w": p["w"].T}
    rows = lambda x, v: jnp.cumsum(jnp.tanh(x), axis=1) @ v
    one = _factors(lambda p, x, tap: rows(x @ p["w"], p["v"]), p, batch, sharing=sharing)
    for product in (
        lambda w, x: x @ w.T,
        lambda w, x: jnp.einsum("oi,nsi->nso", w, x),
        lambda w, x: lax.dot_general(x, w, (((2,), (1,)), ((), ()))),
    ):
        model = lambda p, x, tap, product=product: rows(product(p["w"], x), p["v"])
        other = _factors(model, turned, batch, sharing=sharing)
        for side in ("a", "g"):
            np.testing.assert_allclose(
                getattr(other["w"], side), getattr(one["w"], side), rtol=1e-10, atol=1e-15
            )


@pytest.mark.parametrize("sharing", SHARINGS)
def test_two_uses_of_a_weight_are_one_use_on_their_rows_together(x64, sharing):
    p = tree(64, w=(4, 5), b=(5,), v=(5, 3))
    batch = (normal(1, 3, 4, 4), labels(2, 3, 4))

    def together(p, x, tap):
        return jnp.cumsum(jnp.tanh(x @ p["w"] + p["b"]), axis=1) @ p["v"]

    def apart(p, x, tap):
        h = [jnp.tanh(part @ p["w"] + p["b"]) for part in (x[:, :1], x[:, 1:])]
        return jnp.cumsum(jnp.concatenate(h, axis=1), axis=1) @ p["v"]

    one, two = (_factors(model, p, batch, sharing=sharing) for model in (together, apart))
    assert two.layer("w").uses == 2
    for name in ("w", "v"):
        for x, y in zip(one[name], two[name], strict=True):
            np.testing.assert_allclose(y, x, rtol=1e-10, atol=1e-15)
