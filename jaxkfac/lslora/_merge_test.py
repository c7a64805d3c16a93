"""Merging: exact for plain LoRA, refused or approximate for a nonlinearity."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac.lslora import Config, approximate_merge, as_fourier, attach, init, merge, nf4

KEY = jax.random.key(0)
PARAMS = {
    "s": jax.random.normal(KEY, (2, 4, 4)) / 2,
    "w": jax.random.normal(KEY, (4, 2, 3)),
    "b": jnp.ones((2, 3)),
}
X = jax.random.normal(jax.random.key(1), (30, 4))


def fn(p, x):
    h = jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, p["s"])[0]
    return jnp.einsum("nd,dhk->nhk", h, p["w"]) + p["b"]


def adapters_of(config, scale=0.3):
    fresh = init(fn, config, PARAMS, X, key=KEY)
    return {
        n: x._replace(b=scale * jax.random.normal(KEY, x.b.shape, x.b.dtype))
        for n, x in fresh.items()
    }


@pytest.mark.slow
def test_a_merged_model_computes_what_plain_lora_computes():
    config = Config(rank=2, alpha=3, fourier_placement="none")
    adapted, adapters = attach(fn, config), adapters_of(config)
    merged = merge(adapted, PARAMS, adapters, X)
    want = adapted(PARAMS, adapters, X)
    np.testing.assert_allclose(fn(merged, X), want, rtol=1e-5, atol=1e-6)
    assert np.abs(want - fn(PARAMS, X)).max() > 0.1
    fitted = approximate_merge(adapted, PARAMS, adapters, X)
    np.testing.assert_allclose(fn(fitted.params, X), want, rtol=1e-4, atol=1e-5)
    assert all(np.all(e < 1e-3) for e in fitted.errors.values())  # root of float32's rounding


def test_merging_a_nonlinearity_is_refused_with_the_reason():
    config = Config(rank=2)
    with pytest.raises(ValueError, match=r"s, w cannot be merged: phi is not linear.*approximate"):
        merge(attach(fn, config), PARAMS, adapters_of(config), X)


def test_a_quantised_base_is_not_merged_into():
    params = {"layers": {"kernel": jnp.ones((64, 4))}}

    def dense(p, x):
        return x @ p["layers"]["kernel"]

    config, x = Config(rank=2, fourier_placement="none"), jnp.ones((3, 64))
    adapters = init(dense, config, params, x, key=KEY)
    with pytest.raises(ValueError, match=r"layers/kernel are quantised.*dequantize"):
        merge(attach(dense, config), nf4.quantize(params), adapters, x)


@pytest.mark.slow
def test_the_approximate_merge_is_the_least_squares_fit_and_reports_its_error(x64):
    params = jax.tree.map(lambda x: x.astype(jnp.float64), PARAMS)
    x = X.astype(jnp.float64)
    config = Config(rank=2, alpha=3, target="w")

    def last(p, x):
        return jnp.einsum("nd,dhk->nhk", x, p["w"]) + p["b"]

    adapters = init(last, config, params, x, key=KEY)
    adapters["w"] = adapters["w"]._replace(
        b=jax.random.normal(KEY, (2, 6)), coefficients=jnp.array([0.5, 1.0, -0.3, 0.2])
    )
    adapted = attach(last, config)
    fitted, errors = approximate_merge(adapted, params, adapters, x)
    branch = np.asarray(adapted(params, adapters, x) - last(params, x)).reshape(30, 6)
    design = np.concatenate([x, np.ones((30, 1))], 1)  # the intercept goes to the bias
    solution, residual, *_ = np.linalg.lstsq(design, branch, rcond=None)
    np.testing.assert_allclose(
        fitted["w"] - params["w"], solution[:-1].reshape(4, 2, 3), rtol=1e-8, atol=1e-10
    )
    np.testing.assert_allclose(fitted["b"] - params["b"], solution[-1].reshape(2, 3), rtol=1e-8)
    want = np.sqrt(residual.sum() / np.square(branch).sum())
    np.testing.assert_allclose(errors["w"], want, rtol=1e-8)
    assert 0.05 < want < 0.95


@pytest.mark.slow
def test_errors_are_reported_for_each_slice_of_a_scan():
    config = Config(rank=2, alpha=3, target="s", init_sigma=0.3)
    adapters = adapters_of(config, 0.5)
    fitted, errors = approximate_merge(attach(fn, config), PARAMS, adapters, X)
    assert errors["s"].shape == (2,) and np.all(errors["s"] > 0.01)
    adapted = attach(fn, config)(PARAMS, adapters, X)
    near, far = (float(jnp.square(fn(p, X) - adapted).mean()) for p in (fitted, PARAMS))
    assert near < far / 2


@pytest.mark.exhaustive
def test_experts_that_read_the_same_rows_are_fitted_apart():
    def outputs(p, x):
        return jnp.einsum("ni,eio->neo", x, p["e"])

    params = {"e": jax.random.normal(KEY, (3, 4, 5))}
    config = Config(rank=2, fourier_placement="none", target="e", experts="e")
    adapters = init(outputs, config, params, X, key=KEY)
    adapters["e"] = adapters["e"]._replace(b=jax.random.normal(KEY, (3, 2, 5)))
    adapted = attach(outputs, config)
    fitted = approximate_merge(adapted, params, adapters, X).params
    exact = merge(adapted, params, adapters, X)
    np.testing.assert_allclose(fitted["e"], exact["e"], rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(
        outputs(exact, X), adapted(params, adapters, X), rtol=1e-5, atol=1e-5
    )


def test_a_kernel_that_something_else_reads_is_not_merged():
    def tied(p, ids):
        return p["table"][ids] @ p["table"].T

    params, ids = {"table": jnp.ones((5, 4))}, jnp.arange(3)
    config = Config(rank=1, target="table", fourier_placement="none")
    adapters = init(tied, config, params, ids, key=KEY)
    with pytest.raises(ValueError, match=r"also read as 'table@embedding'"):
        merge(attach(tied, config), params, adapters, ids)
    config = Config(rank=1, fourier_placement="none")

    def scaled(p, x):
        return x @ (p["w"] / 2)

    params = {"w": jnp.ones((4, 3))}
    adapters = init(scaled, config, params, X, key=KEY)
    with pytest.raises(ValueError, match="multiplies its parameter by a constant"):
        merge(attach(scaled, config), params, adapters, X)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("placement", ["output", "bottleneck"])
def test_a_warm_start_is_plain_lora_up_to_a_third_of_the_squared_ratio(placement, x64):
    config = Config(rank=2, alpha=3, fourier_placement="none", target="w")

    def last(p, x):
        return jnp.einsum("nd,dhk->nhk", x, p["w"])

    params, x = jax.tree.map(lambda v: v.astype(jnp.float64), (PARAMS, X))
    adapters = init(last, config, params, x, key=KEY)
    adapters["w"] = adapters["w"]._replace(b=jax.random.normal(KEY, (2, 6)))
    want = attach(last, config)(params, adapters, x) - last(params, x)
    for sigma in (30.0, 300.0):
        warm, settings = as_fourier(adapters, config, sigma=sigma, fourier_placement=placement)
        got = attach(last, settings)(params, warm, x) - last(params, x)
        z = 1.5 * x @ adapters["w"].a
        largest = np.abs(want).max() if placement == "output" else np.abs(z).max()
        error = float(np.abs(got - want).max() / np.abs(want).max())
        assert 0 < error <= (largest / sigma) ** 2 / 3 * 1.01
    grads = jax.grad(lambda a: attach(last, settings)(params, a, x).sum())(warm)["w"]
    assert all(np.any(g != 0) for g in jax.tree.leaves(grads))
    with pytest.raises(ValueError, match="w have a nonlinearity already"):
        as_fourier(warm, settings, sigma=1.0)


def test_adapters_that_do_not_fit_the_config_or_the_layer_are_not_merged():
    config = Config(rank=2, fourier_placement="none")
    adapters, other = adapters_of(config), Config(rank=4, fourier_placement="none")
    with pytest.raises(ValueError, match=r"'s': the adapter has rank 2, and the config says 4"):
        merge(attach(fn, other), PARAMS, adapters, X)
    of_one_slice = adapters | {"s": jax.tree.map(lambda x: x[0], adapters["s"])}
    with pytest.raises(ValueError, match=r"'s': expected a of shape \(2, 4, 2\), got \(4, 2\)"):
        merge(attach(fn, config), PARAMS, of_one_slice, X)


@pytest.mark.slow
def test_a_branch_that_no_gradient_reaches_is_not_called_exact():
    def routed(p, x):
        choice = jax.nn.one_hot(jnp.argmax(x @ p["router"], -1), 4)
        return x @ p["kernel"] * choice

    params = {"router": PARAMS["s"][0], "kernel": PARAMS["s"][1]}
    config = Config(rank=2, target="router|kernel")
    adapters = init(routed, config, params, X, key=KEY)
    with pytest.raises(ValueError, match=r"^router cannot be fitted: no gradient reaches"):
        approximate_merge(attach(routed, config), params, adapters, X)


@pytest.mark.slow
def test_a_fit_to_too_few_rows_warns_and_one_to_nan_is_refused():
    config = Config(rank=2)
    adapted, adapters = attach(fn, config), adapters_of(config)
    with pytest.warns(UserWarning, match=r"^s, w: the batch has fewer rows than the layer has"):
        approximate_merge(adapted, PARAMS, adapters, X[:3])
    with pytest.raises(ValueError, match=r"'s' cannot be fitted: the sums .* are not finite"):
        approximate_merge(adapted, PARAMS, adapters, X.at[0].set(jnp.nan))
