"""The oracle itself, against hand derivations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests._dense import fisher_block, root_fisher
from tests._likelihoods import fisher_columns, mean_loss, pulls
from tests._oracle import corrected_eigenvalues, oracle
from tests._programs import labels, normal, tree
from tests._taps import PLAIN, patches


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


@pytest.mark.slow
def test_exact_factors_of_a_deep_linear_gaussian_net_give_its_ggn(x64):
    rng = np.random.default_rng(1)
    w = {f"w{i}": jnp.asarray(rng.normal(size=s)) for i, s in enumerate([(2, 3), (3, 2), (2, 2)])}
    x, y = rng.normal(size=(5, 2)), rng.normal(size=(5, 2))
    found = oracle(_deep_linear, w, (x, y), likelihood="gaussian", fisher="exact")
    jacobian = jax.jacobian(lambda p: _deep_linear(p, jnp.asarray(x), PLAIN))(w)
    for name in w:
        j = np.asarray(jacobian[name]).reshape(5 * 2, -1)
        np.testing.assert_allclose(np.kron(found[name].a, found[name].g), j.T @ j / 5, rtol=1e-10)


@pytest.mark.slow
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


def _mixing(p, x, tap):
    """A norm with scale and bias, and sums over positions, so that rows mix."""
    h = x - x.mean(-1, keepdims=True)
    h = tap.scale("scale", h, h * p["scale"], shape=(4,))
    h = tap.lone_bias("shift", h + p["shift"], shape=(4,))
    h = jnp.cumsum(jnp.tanh(tap.dense("w", h, h @ p["w"] + p["b"], bias=True)), axis=1)
    return tap.dense("v", h, h @ p["v"])


@pytest.mark.default(1, slow=0)
@pytest.mark.parametrize("fisher", ["empirical", "mc", "exact"])
def test_example_sums_are_the_gradients_of_the_parameters(x64, fisher):
    """Rows summed over positions are what the Jacobian of the parameters gives."""
    p = tree(71, scale=(4,), shift=(4,), w=(4, 5), b=(5,), v=(5, 3))
    mask = jnp.asarray([[1, 1, 0], [0, 1, 1]], bool)
    batch = (normal(1, 2, 3, 4, scale=1.0), labels(2, 2, 3), mask)
    extra = {"fisher": fisher, "labels": labels(3, 2, 2, 3) if fisher == "mc" else None}
    root = root_fisher(_mixing, p, batch, **extra)
    blocks = oracle(_mixing, p, batch, scales="full_block", **extra)
    for name in ("scale", "shift"):
        np.testing.assert_allclose(blocks[name].g, fisher_block(root, name), rtol=1e-10, atol=1e-15)
    rng = np.random.default_rng(9)
    bases = dict.fromkeys(blocks, (None, None))
    bases["w"] = q_a, q_g = [np.linalg.qr(rng.normal(size=(5, 5)))[0] for _ in "ag"]
    squares = corrected_eigenvalues(_mixing, p, batch, bases, **extra)
    turn = np.kron(q_a, q_g)
    diagonal = np.diag(turn.T @ fisher_block(root, "w", "b") @ turn).reshape(5, 5)
    np.testing.assert_allclose(squares["w"].values, diagonal, rtol=1e-10, atol=1e-15)
    diagonal = np.diag(fisher_block(root, "scale"))
    np.testing.assert_allclose(squares["scale"].values, diagonal, rtol=1e-10, atol=1e-15)
    expand = oracle(_mixing, p, batch, **extra)["scale"].diagonal
    assert np.abs(expand - np.diag(fisher_block(root, "scale"))).max() > 1e-3


@pytest.mark.slow
def test_the_dense_exact_fisher_is_the_ggn(x64):
    """By the Hessian of the loss where outputs are linear in the parameters."""

    def model(p, x, tap):
        return tap.dense("w", x, jnp.cumsum(x, axis=1) @ p["w"])

    p = tree(72, w=(4, 3))
    mask = jnp.asarray([[1, 1, 0], [0, 1, 1]], bool)
    batch = (normal(1, 2, 3, 4), labels(2, 2, 3), mask)
    hessian = jax.hessian(lambda p: mean_loss(model, "categorical", p, batch))(p)["w"]["w"]
    ggn = fisher_block(root_fisher(model, p, batch), "w")
    np.testing.assert_allclose(ggn, hessian.reshape(12, 12), rtol=1e-10, atol=1e-15)


def test_dilated_windows_times_kernel_are_a_dilated_convolution(x64):
    rng = np.random.default_rng(6)
    x, k = rng.normal(size=(2, 5, 6, 3)), rng.normal(size=(3, 2, 3, 4))
    pads = ((1, 2), (0, 1))
    rows = patches(x, (3, 2), (2, 1), pads, dilation=(2, 3), input_dilation=(2, 1))
    reference = jax.lax.conv_general_dilated(
        x, k, (2, 1), pads, lhs_dilation=(2, 1), rhs_dilation=(2, 3),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )  # fmt: skip
    np.testing.assert_allclose(jnp.einsum("nxyabc,abco->nxyo", rows, k), reference, atol=1e-12)


def test_reduce_by_hand(x64):
    rng = np.random.default_rng(7)
    w = {"w": jnp.asarray(rng.normal(size=(3, 2)))}
    x, y = rng.normal(size=(2, 4, 3)), rng.normal(size=(2, 4, 2))
    here = np.array([[1, 1, 1, 0], [1, 1, 0, 0]], bool)
    model = lambda p, x, tap: tap.dense("w", x, x @ p["w"])
    found = oracle(model, w, (x, y, here), likelihood="gaussian", positions=here, sharing="reduce")[
        "w"
    ]
    a = np.stack([x[0, :3].mean(0), x[1, :2].mean(0)])
    g = ((x @ np.asarray(w["w"]) - y) * here[..., None]).sum(1)
    np.testing.assert_allclose(found.a, a.T @ a / 2, rtol=1e-12)
    np.testing.assert_allclose(found.g, g.T @ g / 5, rtol=1e-12)


def test_labels_of_each_term_weighed_by_probability_give_the_columns(x64):
    """The Fisher of one term by enumeration of its labels, against its root."""
    z = np.random.default_rng(8).normal(size=4)
    p = np.exp(z) / np.exp(z).sum()
    gradients = [pulls("categorical", "empirical", z, y, np.ones(()))[0] for y in np.arange(4)]
    by_labels = sum(p[y] * np.outer(g, g) for y, g in enumerate(gradients))
    columns = fisher_columns("categorical", z)
    np.testing.assert_allclose(by_labels, columns.T @ columns, atol=1e-14)
