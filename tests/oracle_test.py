"""The oracle itself, against hand derivations."""

import jax
import jax.numpy as jnp
import numpy as np

from tests._oracle import PLAIN, fisher_columns, mean_loss, oracle, patches


def _deep_linear(params, x, tap):
    for name in ("w0", "w1", "w2"):
        x = tap.dense(name, x, x @ params[name])
    return x


def test_deep_linear_gaussian_net_has_the_factors_derived_by_hand(x64):
    rng = np.random.default_rng(0)
    w = {f"w{i}": rng.normal(size=s) for i, s in enumerate([(3, 4), (4, 5), (5, 2)])}
    x, y = rng.normal(size=(6, 3)), rng.normal(size=(6, 2))
    found = oracle(_deep_linear, jax.tree.map(jnp.asarray, w), (x, y), likelihood="gaussian")
    residual = x @ w["w0"] @ w["w1"] @ w["w2"] - y
    inputs = [x, x @ w["w0"], x @ w["w0"] @ w["w1"]]
    back = [residual @ w["w2"].T @ w["w1"].T, residual @ w["w2"].T, residual]
    for i in range(3):
        np.testing.assert_allclose(found[f"w{i}"].a, inputs[i].T @ inputs[i] / 6, rtol=1e-12)
        np.testing.assert_allclose(found[f"w{i}"].g, back[i].T @ back[i] / 6, rtol=1e-12)


def test_exact_factors_of_a_deep_linear_gaussian_net_give_its_ggn(x64):
    rng = np.random.default_rng(1)
    w = {f"w{i}": jnp.asarray(rng.normal(size=s)) for i, s in enumerate([(2, 3), (3, 2), (2, 2)])}
    x, y = rng.normal(size=(5, 2)), rng.normal(size=(5, 2))
    found = oracle(_deep_linear, w, (x, y), likelihood="gaussian", fisher="exact")
    jacobian = jax.jacobian(lambda p: _deep_linear(p, jnp.asarray(x), PLAIN))(w)
    for name in w:
        j = np.asarray(jacobian[name]).reshape(5 * 2, -1)
        np.testing.assert_allclose(np.kron(found[name].a, found[name].g), j.T @ j / 5, rtol=1e-10)


def test_softmax_columns_give_the_hessian_of_cross_entropy(x64):
    z = np.random.default_rng(2).normal(size=4)
    v = fisher_columns("categorical", z)
    hessian = jax.hessian(lambda z: jax.nn.logsumexp(z))(jnp.asarray(z))
    np.testing.assert_allclose(v.T @ v, hessian, atol=1e-12)


def test_bernoulli_columns_give_the_hessian(x64):
    z = np.random.default_rng(3).normal(size=4)
    v = fisher_columns("bernoulli", z)
    hessian = jax.hessian(lambda z: jnp.sum(jax.nn.softplus(z)))(jnp.asarray(z))
    np.testing.assert_allclose(v.T @ v, hessian, atol=1e-12)


def test_masked_terms_and_absent_positions_leave_sums_and_counts(x64):
    rng = np.random.default_rng(4)
    w = {"w": jnp.asarray(rng.normal(size=(3, 2)))}
    x, y = rng.normal(size=(2, 4, 3)), rng.normal(size=(2, 4, 2))
    mask = np.array([[1, 1, 0, 0], [1, 0, 0, 0]], bool)
    here = np.array([[1, 1, 1, 0], [1, 1, 0, 0]], bool)
    model = lambda p, x, tap: tap.dense("w", x, x @ p["w"])
    found = oracle(model, w, (x, y, mask), likelihood="gaussian", positions=here)["w"]
    g = (x @ np.asarray(w["w"]) - y) * mask[..., None]
    np.testing.assert_allclose(found.a, x[here].T @ x[here] / 5, rtol=1e-12)
    np.testing.assert_allclose(found.g, g[here].T @ g[here] / 3, rtol=1e-12)
    loss = mean_loss(model, "gaussian", w, (x, y, mask))
    np.testing.assert_allclose(loss, (g**2).sum() / 2 / 3, rtol=1e-12)


def test_patches_times_kernel_is_a_convolution(x64):
    rng = np.random.default_rng(5)
    x, k = rng.normal(size=(2, 5, 6, 3)), rng.normal(size=(3, 2, 3, 4))
    rows = patches(x, (3, 2), (2, 1), ((1, 1), (0, 1)))
    by_hand = jnp.einsum("nxyabc,abco->nxyo", rows, k)
    reference = jax.lax.conv_general_dilated(
        x, k, (2, 1), ((1, 1), (0, 1)), dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    np.testing.assert_allclose(by_hand, reference, atol=1e-12)
