"""A parameter that a program reads in several ways, in parts, or back to front."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxkfac as jk
from tests._checks import assert_factors_close, assert_reported
from tests._oracle import oracle
from tests._programs import labels, normal, tree
from tests._taps import PLAIN

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


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elements_have_one_diagonal_whatever_reads_them(name):
    apply_fn, shape = ELEMENTWISE[name]
    factors, expected = exact_diagonals(apply_fn, tree(0, s=shape))
    for layer in factors.layers:
        want = layer.weight.read(expected["s"])[..., 0, :]
        found = factors[layer.name].diagonal
        np.testing.assert_allclose(found.reshape(want.shape), want, rtol=1e-10)


@pytest.mark.slow
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


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", TURNED)
def test_a_kernel_turned_round_before_it_is_put_beside_others_is_no_matrix(name):
    join, q, r = TURNED[name]
    params = tree(0, q=q, r=r)
    factors, expected = exact_diagonals(lambda p, x: jnp.tanh(x @ join(p["q"], p["r"])), params)
    np.testing.assert_allclose(factors["q"].diagonal, expected["q"], rtol=1e-10)


def looped(p, x, *names, tap=None):
    """Layers by name, as a scan over their stack, or one by one with taps."""
    layers = [{key: p[key + name] for key in "wbs" if key + name in p} for name in names]
    if tap is None:
        stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
        return lax.scan(jax.checkpoint(lambda h, w: (step(w, h, PLAIN), None)), x, stack)[0]
    for name, layer in zip(names, layers, strict=True):
        x = step(layer, x, tap, name)
    return x


def step(w, h, tap, name=""):
    if "s" in w:
        h = tap.scale("s" + name, h, h * w["s"], shape=(4,))
    y = h @ w["w"] + w.get("b", 0.0)
    return jnp.tanh(tap.dense("w" + name, h, y, bias="b" in w))


TWICE = {
    "a, b, a": lambda p, x, tap: looped(p, x, *"aba", tap=tap),
    "a and a": lambda p, x, tap: looped(p, x, *"aa", tap=tap),
    "and after the scan": lambda p, x, tap: step(
        {"w": p["wa"]}, looped(p, x, *"ab", tap=tap), tap or PLAIN, "a"
    ),
    "in both orientations": lambda p, x, tap: (tap or PLAIN).dense(
        "wa@transposed", looped(p, x, *"ab", tap=tap), looped(p, x, *"ab", tap=tap) @ p["wa"].T
    ),
}


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", TWICE)
@pytest.mark.parametrize("scaled", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_a_kernel_twice_in_the_stack_of_a_scan_is_one_layer(name, scaled):
    model = TWICE[name]
    params = tree(0, wa=(4, 4), wb=(4, 4), **({"sa": (4,), "sb": (4,)} if scaled else {}))
    if name == "a and a":
        params = {key: value for key, value in params.items() if key.endswith("a")}
    data, objective = (
        (normal(1, *X), labels(2, 5, classes=4)),
        jk.Objective(lambda p, x: model(p, x, None), jk.Categorical()),
    )
    factors = jax.jit(jk.value_grad_and_factors(objective))(params, data).factors
    assert_factors_close(factors, oracle(model, params, data), 1e-10)
    assert set(factors) == set(oracle(model, params, data))


@pytest.mark.slow
def test_a_bias_is_joined_to_the_kernel_that_it_always_goes_with():
    """Of a, b, a with biases a, b, c only b has one bias, and that bias one kernel."""

    def model(p, x, tap):
        p = p | {"wc": p["wa"]}
        if tap is None:
            return looped(p, x, *"abc")
        x = jnp.tanh(tap.lone_bias("ba", tap.dense("wa", x, x @ p["wa"]) + p["ba"], shape=(4,)))
        x = jnp.tanh(tap.dense("wb", x, x @ p["wb"] + p["bb"], bias=True))
        return jnp.tanh(tap.lone_bias("bc", tap.dense("wa", x, x @ p["wa"]) + p["bc"], shape=(4,)))

    params = tree(0, wa=(4, 4), wb=(4, 4), ba=(4,), bb=(4,), bc=(4,))
    data = normal(1, *X), labels(2, 5, classes=4)
    objective = jk.Objective(lambda p, x: model(p, x, None), jk.Categorical())
    factors = jax.jit(jk.value_grad_and_factors(objective))(params, data).factors
    assert factors.layer("wb").bias.path == "bb" and set(factors) == {"wa", "wb", "ba", "bc"}
    assert_factors_close(factors, oracle(model, params, data), 1e-10)


@pytest.mark.slow
def test_some_layers_of_a_stacked_list_can_be_left_out():
    params, data = tree(0, wa=(4, 4), wb=(4, 4)), (normal(1, *X), labels(2, 5, classes=4))
    objective = jk.Objective(lambda p, x: looped(p, x, *"ab"), jk.Categorical())
    every = jk.value_grad_and_factors(objective)(params, data).factors
    factors = jk.value_grad_and_factors(objective, layers="wb")(params, data).factors
    assert list(factors) == ["wb"]
    np.testing.assert_allclose(factors["wb"].a, every["wb"].a, rtol=1e-12)
    np.testing.assert_allclose(factors["wb"].g, every["wb"].g, rtol=1e-12)


OVERLAPPING = {
    "a kernel and its first rows": lambda p, x: jnp.tanh(x @ p["w"])[:, :3] @ p["w"][:3],
    "two ranges of rows": lambda p, x: jnp.tanh(x[:, :3] @ p["w"][:3]) + x[:, :3] @ p["w"][1:],
    "a table and a head": lambda p, x: p["w"][jnp.argmax(x, 1)] @ p["w"][:2].T,
}


@pytest.mark.default(1, slow=0)
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


@pytest.mark.slow
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


@pytest.mark.exhaustive
@pytest.mark.parametrize("shape", [(5, 3, 4), (1, 5, 4), (5, 1, 4), (1, 1, 4)], ids=str)
def test_a_cond_under_two_vmaps_counts_the_rows_that_take_it(shape):
    params, x = tree(0, a=(4, 4), b=(4, 4)), normal(1, *shape)
    targets = normal(2, *shape)
    objective = jk.Objective(jax.vmap(jax.vmap(routed, (None, 0)), (None, 0)), jk.Gaussian())
    factors = jk.value_grad_and_factors(objective)(params, (x, targets))[2]
    for name, taken in (("a", x[..., 0] > 0), ("b", x[..., 0] <= 0)):
        rows = x[taken]
        if not len(rows):
            for leaf in jax.tree.leaves(factors[name]):
                np.testing.assert_array_equal(leaf, 0)
            continue
        out = jnp.tanh(rows @ params[name])
        g = (out - targets[taken]) * (1 - out**2)
        np.testing.assert_allclose(factors[name].a, rows.T @ rows / len(rows), rtol=1e-9)
        np.testing.assert_allclose(factors[name].g, g.T @ g / taken.size, rtol=1e-9)


@pytest.mark.default(1, slow=0)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_cond_under_vmap_of_one_row_counts_the_branch_that_it_takes(sign):
    params, x = tree(0, a=(4, 4), b=(4, 4)), sign * jnp.abs(normal(1, 1, 4))
    data, objective = (x, normal(2, 1, 4)), jk.Objective(jax.vmap(routed, (None, 0)), jk.Gaussian())
    factors = jax.jit(jk.value_grad_and_factors(objective))(params, data).factors
    taken, other = "ab" if sign > 0 else "ba"
    np.testing.assert_allclose(factors[taken].a, x.T @ x, rtol=1e-10)
    assert float(factors.a_counts[taken]) == 1 and float(factors.a_counts[other]) == 0
    for leaf in jax.tree.leaves(factors[other]):
        np.testing.assert_array_equal(leaf, 0)


def test_a_kernel_chosen_by_data_element_by_element_is_reported():
    def model(p, x):
        return x @ jnp.where(x[:4] > 0, p["a"], lax.stop_gradient(p["a"]))

    assert_reported(model, tree(0, a=(4, 4)), (normal(1, *X),), "a", "element by element")


def test_a_stack_of_one_expert_is_its_kernel():
    params, x = tree(0, w=(1, 4, 3)), normal(1, 5, 1, 4)
    objective = jk.Objective(lambda p, x: jnp.einsum("ned,edk->nek", x, p["w"]), jk.Gaussian())
    factors = jk.value_grad_and_factors(objective)(params, (x, normal(2, 5, 1, 3)))[2]
    rows = x[:, 0]
    np.testing.assert_allclose(factors["w"].a, rows.T @ rows / 5, rtol=1e-10)
