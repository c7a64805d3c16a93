"""Experts that read runs of sorted rows: ``jax.lax.ragged_dot``."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxkfac as jk
from tests._checks import assert_block_close, assert_tree_close
from tests._oracle import Block
from tests._programs import labels, normal, tree

pytestmark = pytest.mark.usefixtures("x64")
EXPERTS, WIDTH, HIDDEN = 3, 4, 5
CHOICES = jnp.asarray([0, 2, 0, 2, 2, 0])  # expert 1 gets nothing


def routed(p, x):
    """Each row through the expert that it is sent to, weighed by its gate."""
    gates = jax.nn.softmax(x @ p["router"])
    order = jnp.argsort(CHOICES)
    sizes = jnp.bincount(CHOICES, length=EXPERTS)
    h = jnp.tanh(lax.ragged_dot(x[order], p["up"], sizes))
    y = lax.ragged_dot(h, p["down"], sizes)[jnp.argsort(order)]
    return y * jnp.take_along_axis(gates, CHOICES[:, None], 1)


def params():
    shapes = {"router": (WIDTH, EXPERTS), "up": (EXPERTS, WIDTH, HIDDEN)}
    return tree(1, **shapes, down=(EXPERTS, HIDDEN, 3))


def batch():
    return normal(2, 6, WIDTH), labels(3, 6)


def blocks(p, x, y):
    """Each expert's own rows, one by one; every one of the six is a loss term."""
    gate = np.asarray(jax.nn.softmax(x @ p["router"]))[np.arange(6), CHOICES]
    rows = {"up": [[] for _ in range(EXPERTS)], "down": [[] for _ in range(EXPERTS)]}
    for n, e in enumerate(np.asarray(CHOICES)):
        up, down = np.asarray(p["up"][e]), np.asarray(p["down"][e])
        h = np.tanh(np.asarray(x[n]) @ up)
        score = np.asarray(jax.nn.softmax(gate[n] * (h @ down))) - np.eye(3)[y[n]]
        g = gate[n] * score
        rows["down"][e].append((h, g))
        rows["up"][e].append((np.asarray(x[n]), (g @ down.T) * (1 - h**2)))
    out = {}
    for name, each in rows.items():
        n_in, n_out = p[name].shape[1:]
        a = [
            sum((np.outer(r, r) for r, _ in e), np.zeros((n_in, n_in))) / max(len(e), 1)
            for e in each
        ]
        g = [sum((np.outer(r, r) for _, r in e), np.zeros((n_out, n_out))) / 6 for e in each]
        out[name] = Block("dense", np.stack(a), np.stack(g), None)
    return out


@pytest.mark.slow
def test_an_expert_has_the_rows_that_reach_it():
    p, (x, y) = params(), batch()
    objective = jk.Objective(routed, jk.Categorical())
    value, grads, factors = jax.jit(jk.value_grad_and_factors(objective))(p, (x, y))
    expected = jax.value_and_grad(objective)(p, (x, y))
    assert_tree_close((value, grads), expected, 1e-12)
    for name, block in blocks(p, x, y).items():
        assert_block_close(factors[name], block, 1e-10, name)
        np.testing.assert_array_equal(factors.a_counts[name], [3, 0, 3])
        assert factors.layer(name).kind == "ragged" and factors.layer(name).stack == (EXPERTS,)
    bases = jk.eigendecompose(factors)
    steps = jk.natural_gradient(grads, bases, damping=1e-2)
    assert jax.tree.map(jnp.shape, steps) == jax.tree.map(jnp.shape, p)


@pytest.mark.exhaustive
def test_experts_in_a_list_are_the_slices_of_a_stack():
    def stacked(p):
        each = {name: [p[f"{name}{e}"] for e in range(EXPERTS)] for name in ("up", "down")}
        return {"router": p["router"]} | {name: jnp.stack(w) for name, w in each.items()}

    def statistics(model, p):
        objective = jk.Objective(model, jk.Categorical())
        factors = jax.jit(jk.value_grad_and_factors(objective))(p, batch()).factors
        bases = jk.eigendecompose(factors)
        return factors, jax.jit(jk.correct_eigenvalues(objective, bases, per="token"))(p, batch())

    whole = params()
    apart = {f"{name}{e}": whole[name][e] for name in ("up", "down") for e in range(EXPERTS)}
    expected, measured = statistics(routed, whole)
    found, own = statistics(lambda p, x: routed(stacked(p), x), apart | {"router": whole["router"]})
    for name, e in [(name, e) for name in ("up", "down") for e in range(EXPERTS)]:
        one = f"{name}{e}"
        np.testing.assert_allclose(found[one].a, expected[name].a[e], rtol=1e-10, atol=1e-14)
        np.testing.assert_allclose(found[one].g, expected[name].g[e], rtol=1e-10, atol=1e-14)
        traces = own[one].raw_values.sum(), measured[name].raw_values[e].sum()
        np.testing.assert_allclose(*traces, rtol=1e-10, atol=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize("wall", [lambda f: f, jax.jit])
def test_kernels_with_other_runs_of_the_same_rows_have_their_own_inputs(wall):
    """A jitted function that is called twice has the same equations in both calls."""
    product = wall(lax.ragged_dot)

    def model(p, inputs):
        x, sizes, others = inputs
        return product(x, p["up"], sizes) + product(x, p["down"], others)

    p = tree(5, up=(EXPERTS, WIDTH, 3), down=(EXPERTS, WIDTH, 3))
    x, sizes, others = normal(6, 6, WIDTH), jnp.asarray([1, 2, 3]), jnp.asarray([4, 1, 1])
    stats = jk.value_grad_and_factors(jk.Objective(model, jk.Categorical()), examples="apart")
    *_, factors = stats(p, ((x, sizes, others), labels(7, 6)))
    for name, first in (("up", 1), ("down", 4)):
        rows = np.asarray(x)[:first]
        np.testing.assert_allclose(factors[name].a[0], rows.T @ rows / first, rtol=1e-12)


@pytest.mark.default(1, slow=0)
@pytest.mark.parametrize("wall", [jax.jit, jax.checkpoint])
def test_rows_behind_the_last_run_reach_nobody(wall):
    """Padding: seven rows, of which the sizes name six; inside a scan of remat."""
    sizes = jnp.asarray([2, 0, 4], jnp.int32)  # though integers have 64 bits here

    def model(p, x):
        def layer(x, w):
            return x + wall(lambda x: jnp.tanh(lax.ragged_dot(x, w, sizes)))(x), None

        return lax.scan(layer, x, p["w"])[0]

    p, x = {"w": normal(1, 2, EXPERTS, WIDTH, WIDTH)}, normal(2, 7, WIDTH)
    objective = jk.Objective(model, jk.Gaussian())
    factors = jax.jit(jk.value_grad_and_factors(objective))(p, (x, normal(3, 7, WIDTH))).factors
    np.testing.assert_array_equal(factors.a_counts["w"], [[2, 0, 4]] * 2)
    a = np.asarray(x[2:6]).T @ np.asarray(x[2:6]) / 4
    np.testing.assert_allclose(factors["w"].a[0, 2], a, rtol=1e-10)


@pytest.mark.exhaustive
def test_single_rows_are_measured_in_the_eigenbases():
    p, (x, y) = params(), batch()
    objective = jk.Objective(routed, jk.Categorical())
    factors = jk.value_grad_and_factors(objective, layers="down")(p, (x, y)).factors
    bases = jk.eigendecompose(factors)
    found = jk.correct_eigenvalues(objective, bases, per="token")(p, (x, y))["down"].raw_values
    a, g = factors["down"].a, factors["down"].g
    # The trace of a sum of rank one products is the sum of their squared norms.
    h = np.tanh(np.einsum("nd,ndh->nh", x, p["up"][CHOICES]))
    gate = np.asarray(jax.nn.softmax(x @ p["router"]))[np.arange(6), CHOICES]
    logits = gate[:, None] * np.einsum("nh,nhc->nc", h, p["down"][CHOICES])
    score = gate[:, None] * (np.asarray(jax.nn.softmax(logits)) - np.eye(3)[y])
    norms = (h**2).sum(1) * (score**2).sum(1) / 6
    expected = [norms[np.asarray(CHOICES) == e].sum() for e in range(EXPERTS)]
    np.testing.assert_allclose(found.sum((1, 2)), expected, rtol=1e-10, atol=1e-14)
    assert a.shape == (EXPERTS, HIDDEN, HIDDEN) and g.shape == (EXPERTS, 3, 3)


@pytest.mark.slow
def test_scores_of_layers_whose_rows_are_sorted_by_expert_are_refused_by_name():
    """Behind the sort no row is known to be of an example, and before it none of an output."""
    p, data = params(), batch()
    objective = jk.Objective(routed, jk.Categorical())
    bases = jk.eigendecompose(jk.value_grad_and_factors(objective)(p, data).factors)
    for name in p:
        match = f"'{name}' cannot be told apart by example.*leave it out with layers="
        with pytest.raises(jk.LostRowsError, match=match):
            jk.influence(objective, p, bases, data, data, layers=name)
        with pytest.raises(jk.LostRowsError, match=match):
            jk.self_influence(objective, p, bases, data, layers=name)
