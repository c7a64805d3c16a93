"""A parameter that a program reads in several ways, in parts, or back to front."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxkfac as jk
from tests._checks import assert_reported
from tests._programs import normal, tree

pytestmark = pytest.mark.usefixtures("x64")
X = (5, 4)


def exact_diagonals(apply_fn, params, shape=X):
    """What the engine says, and each example's gradient, squared."""
    x = normal(1, *shape)
    batch = x, normal(2, *apply_fn(params, x).shape)
    objective = jk.Objective(apply_fn, jk.Gaussian())
    stats = jax.jit(jk.value_grad_and_factors(objective, scales="exact_diagonal"))
    _, grads, factors = stats(params, batch)
    each = jax.vmap(lambda one: jax.grad(objective)(params, jax.tree.map(lambda v: v[None], one)))
    bases = jk.eigendecompose(factors)
    updates = jk.natural_gradient(grads, bases, damping=1e-2)
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, params)
    return factors, jax.tree.map(lambda g: (g**2).mean(0), each(batch))


def scanned(h, stack):
    return lax.scan(lambda h, w: (jnp.tanh(h * w), None), h, stack)[0]


ELEMENTWISE = {
    "scale and bias": (lambda p, x: x * p["s"] + p["s"], (4,)),
    "whole and a range": (lambda p, x: jnp.tanh(x - p["s"])[:, :3] + p["s"][:3], (4,)),
    "overlapping ranges": (lambda p, x: jnp.tanh(x + p["s"][2:6]) * p["s"][:4], (7,)),
    "a table longer than the data": (lambda p, x: jnp.tanh(x + p["s"][:4]), (9,)),
    "a range scanned, a row added": (lambda p, x: scanned(x, p["s"][1:3]) + p["s"][0], (4, 4)),
    "rows stacked again": (lambda p, x: scanned(x, jnp.stack([p["s"][0], p["s"][1]])), (2, 4)),
    "halves changed round": (lambda p, x: x * jnp.concatenate([p["s"][2:], p["s"][:2]]), (4,)),
    "twice side by side": (lambda p, x: x * jnp.concatenate([p["s"], p["s"]]), (2,)),
    "twice in a stack": (lambda p, x: scanned(x, jnp.stack([p["s"], p["s"]])), (4,)),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elements_have_one_diagonal_whatever_reads_them(name):
    apply_fn, shape = ELEMENTWISE[name]
    factors, expected = exact_diagonals(apply_fn, tree(0, s=shape))
    for layer in factors.layers:
        want = layer.weight.read(expected["s"])[..., 0, :]
        found = factors[layer.name].diagonal
        np.testing.assert_allclose(found.reshape(want.shape), want, rtol=1e-10)


def test_a_bias_that_is_a_scale_too_is_no_column_of_a_kernel():
    params = tree(0, w=(4, 3), s=(3,))
    factors, expected = exact_diagonals(lambda p, x: (x @ p["w"] + p["s"]) * p["s"], params)
    np.testing.assert_allclose(factors["s"].diagonal, expected["s"], rtol=1e-10)
    assert factors["w"].a.shape == (4, 4)


TURNED = {
    "rows beside others": (lambda q, r: jnp.concatenate([q[::-1], r]), (2, 3), (2, 3)),
    "columns beside others": (lambda q, r: jnp.concatenate([q[:, ::-1], r], 1), (4, 3), (4, 2)),
    "padded": (lambda q, r: jnp.pad(q[::-1], ((1, 0), (0, 0))) * r, (3, 3), ()),
}


@pytest.mark.parametrize("name", TURNED)
def test_a_kernel_turned_round_before_it_is_put_beside_others_is_no_matrix(name):
    join, q, r = TURNED[name]
    params = tree(0, q=q, r=r)
    factors, expected = exact_diagonals(lambda p, x: jnp.tanh(x @ join(p["q"], p["r"])), params)
    np.testing.assert_allclose(factors["q"].diagonal, expected["q"], rtol=1e-10)


def test_a_kernel_twice_in_the_stack_of_a_scan_is_one_layer():
    def apply_fn(p, x):
        w = jnp.stack([p["a"], p["b"], p["a"]])
        return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0]

    factors, expected = exact_diagonals(apply_fn, tree(0, a=(4, 4), b=(4, 4)))
    for name in "ab":
        np.testing.assert_allclose(factors[name].diagonal, expected[name], rtol=1e-10)


OVERLAPPING = {
    "a kernel and its first rows": lambda p, x: jnp.tanh(x @ p["w"])[:, :3] @ p["w"][:3],
    "two ranges of rows": lambda p, x: jnp.tanh(x[:, :3] @ p["w"][:3]) + x[:, :3] @ p["w"][1:],
    "a table and a head": lambda p, x: p["w"][jnp.argmax(x, 1)] @ p["w"][:2].T,
}


@pytest.mark.parametrize("name", OVERLAPPING)
def test_overlapping_ranges_of_a_matrix_are_reported(name):
    params, x = tree(0, w=(4, 4)), normal(1, *X)
    assert_reported(OVERLAPPING[name], params, (x,), "w", "overlapping ranges")
    objective = jk.Objective(OVERLAPPING[name], jk.Gaussian())
    stats = jk.value_grad_and_factors(objective, uncovered="ignore")
    assert not list(stats(params, (x, OVERLAPPING[name](params, x)))[2])


@jax.custom_vjp
def signs(w):
    return jnp.sign(w)


signs.defvjp(lambda w: (jnp.sign(w), None), lambda _, g: (g,))


def test_a_parameter_that_is_rounded_with_a_backward_rule_has_the_diagonal_of_that_rule():
    def apply_fn(p, x):
        return jnp.tanh(x @ signs(p["w"])) @ p["v"]

    params, x = tree(0, w=(4, 3), v=(3, 2)), normal(1, *X)
    objective = jk.Objective(apply_fn, jk.Gaussian())
    batch = x, normal(2, 5, 2)
    _, grads, factors = jk.value_grad_and_factors(objective)(params, batch)
    each = jax.vmap(lambda one: jax.grad(objective)(params, jax.tree.map(lambda v: v[None], one)))
    np.testing.assert_allclose(grads["w"], jax.grad(objective)(params, batch)["w"], rtol=1e-12)
    np.testing.assert_allclose(factors["w"].diagonal, (each(batch)["w"] ** 2).mean(0), rtol=1e-10)
    assert list(factors) == ["w@effective", "v", "w"]


def routed(p, x):
    """Each row by itself, through the kernel that it chooses."""
    steps = (lambda h: jnp.tanh(h @ p["a"])), (lambda h: jnp.tanh(h @ p["b"]))
    return lax.cond(x[0] > 0, *steps, x)


@pytest.mark.parametrize("shape", [(5, 3, 4), (1, 5, 4), (5, 1, 4)], ids=str)
def test_a_cond_under_two_vmaps_counts_the_rows_that_take_it(shape):
    params, x = tree(0, a=(4, 4), b=(4, 4)), normal(1, *shape)
    targets = normal(2, *shape)
    objective = jk.Objective(jax.vmap(jax.vmap(routed, (None, 0)), (None, 0)), jk.Gaussian())
    factors = jk.value_grad_and_factors(objective)(params, (x, targets))[2]
    for name, taken in (("a", x[..., 0] > 0), ("b", x[..., 0] <= 0)):
        rows = x[taken]
        out = jnp.tanh(rows @ params[name])
        g = (out - targets[taken]) * (1 - out**2)
        assert len(rows)
        np.testing.assert_allclose(factors[name].a, rows.T @ rows / len(rows), rtol=1e-9)
        np.testing.assert_allclose(factors[name].g, g.T @ g / taken.size, rtol=1e-9)


def test_a_cond_under_vmap_of_one_row_is_reported():
    params = tree(0, a=(4, 4), b=(4, 4))
    model = jax.vmap(routed, (None, 0))
    assert_reported(model, params, (normal(1, 1, 4),), "a", "at least two rows")


def test_a_stack_of_one_expert_is_its_kernel():
    params, x = tree(0, w=(1, 4, 3)), normal(1, 5, 1, 4)
    objective = jk.Objective(lambda p, x: jnp.einsum("ned,edk->nek", x, p["w"]), jk.Gaussian())
    factors = jk.value_grad_and_factors(objective)(params, (x, normal(2, 5, 1, 3)))[2]
    rows = x[:, 0]
    np.testing.assert_allclose(factors["w"].a, rows.T @ rows / 5, rtol=1e-10)
