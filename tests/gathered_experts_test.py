"""Experts whose kernels are gathered row by row: a stack, each with the rows that pick it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxkfac as jk
from tests._checks import assert_factors_close, assert_tree_close, objective_of
from tests._example_gradients import check_scores
from tests._likelihoods import mean_loss
from tests._oracle import oracle
from tests._programs import labels, normal, tree

pytestmark = pytest.mark.usefixtures("x64")
EXPERTS, WIDTH, HIDDEN, TOKENS = 4, 4, 5, 3
CHOICES = jnp.asarray([[[0, 2], [2, 3], [0, 3]], [[3, 2], [2, 0], [2, 3]]])  # nobody picks 1


def params():
    shapes = {"router": (WIDTH, EXPERTS), "up": (EXPERTS, WIDTH, HIDDEN)}
    return tree(1, **shapes, down=(EXPERTS, HIDDEN, WIDTH), head=(WIDTH, 3))


def batch():
    inputs = {"x": normal(2, *CHOICES.shape[:2], WIDTH), "k": CHOICES}
    return inputs, labels(3, *CHOICES.shape[:2])


def gates(p, x, tap):
    logits = tap.dense("router", x["x"], x["x"] @ p["router"])
    return jnp.take_along_axis(jax.nn.softmax(logits), x["k"], -1)


def gathered(p, x, tap):
    """Each token through the two experts that it picks, as a top-2 mixture does."""
    h = jnp.tanh(jnp.einsum("nsd,nskdh->nskh", x["x"], p["up"][x["k"]]))
    h = gates(p, x, tap)[..., None] * h
    y = jnp.einsum("nskh,nskhd->nsd", h, p["down"][x["k"]])
    return tap.dense("head", y, y @ p["head"])


def flattened(p, x, tap):
    """The same over a list of pairs of a token and an expert."""
    rows = jnp.repeat(x["x"].reshape(-1, WIDTH), 2, axis=0)
    experts = x["k"].reshape(-1)
    h = jnp.tanh((rows[:, None] @ p["up"][experts])[:, 0]) * gates(p, x, tap).reshape(-1, 1)
    y = jnp.squeeze(h[:, None] @ p["down"].astype(x["x"].dtype)[experts], 1)
    y = y.reshape(*x["k"].shape, WIDTH).sum(-2)
    return tap.dense("head", y, y @ p["head"])


def token_by_token(p, x, tap):
    """The same of one token and one expert, mapped over all."""

    def one(x, g, k):
        return (g * jnp.tanh(x @ p["up"][k])) @ p["down"][k]

    over_experts = jax.vmap(one, (None, 0, 0))
    each = jax.vmap(jax.vmap(over_experts))
    y = each(x["x"], gates(p, x, tap), x["k"]).sum(2)
    return tap.dense("head", y, y @ p["head"])


def in_scan_and_remat(p, x, tap):
    """The same, one of the two picks at a time."""
    g = gates(p, x, tap)

    @jax.checkpoint
    def step(y, at):
        k, g = at
        h = g[..., None] * jnp.tanh(jnp.einsum("nsd,nsdh->nsh", x["x"], p["up"][k]))
        return y + jnp.einsum("nsh,nshd->nsd", h, p["down"][k]), None

    y = lax.scan(step, 0 * x["x"], (jnp.moveaxis(x["k"], -1, 0), jnp.moveaxis(g, -1, 0)))[0]
    return tap.dense("head", y, y @ p["head"])


def every_expert(p, x, tap):
    """Every expert on every row; of those that are not picked nothing is read."""
    g, y = gates(p, x, tap), 0.0
    for e in range(EXPERTS):
        picked = (x["k"] == e).any(-1)
        gate = jnp.where(x["k"] == e, g, 0.0).sum(-1)
        h = jnp.tanh(tap.dense("up", x["x"], x["x"] @ p["up"][e], at=(e,)))
        h = gate[..., None] * h
        y = y + jnp.where(picked[..., None], tap.dense("down", h, h @ p["down"][e], at=(e,)), 0.0)
    return tap.dense("head", y, y @ p["head"])


def expected(p, data, **options):
    """Brute force counts every row in A; here only those that reach an expert."""
    found = oracle(every_expert, p, data, **options)
    x, k = (np.asarray(data[0][name]) for name in "xk")
    there = np.asarray(options.get("positions", np.ones(k.shape[:2], bool)))
    for name in ("up", "down"):
        a = []
        for e in range(EXPERTS):
            picked = (k == e).any(-1) & there
            gate = np.asarray(jax.nn.softmax(x @ p["router"]))[..., e : e + 1]
            rows = x if name == "up" else gate * np.tanh(x @ np.asarray(p["up"][e]))
            if options.get("sharing") == "reduce":
                number = picked.sum(1)
                sums = (rows * picked[..., None]).sum(1)[number > 0] / number[number > 0, None]
            else:
                sums = rows[picked]
            a.append(sums.T @ sums / max(len(sums), 1))
        found[name] = found[name]._replace(a=np.stack(a))
    return found


WAYS = {
    "top-2": gathered,
    "flattened": flattened,
    "vmap": token_by_token,
    "scan and remat": in_scan_and_remat,
}


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", WAYS)
def test_an_expert_has_the_rows_that_pick_it(name):
    p, data = params(), batch()
    stats = jax.jit(jk.value_grad_and_factors(objective_of(WAYS[name])))
    value, grads, factors = stats(p, data)
    direct = jax.value_and_grad(lambda p: mean_loss(every_expert, "categorical", p, data))
    assert_tree_close((value, grads), direct(p), 1e-10)
    assert_factors_close(factors, expected(p, data), 1e-10)
    np.testing.assert_array_equal(factors.a_counts["up"], [3, 0, 5, 4])
    assert factors.layer("up").kind == "gathered" and factors.layer("up").stack == (EXPERTS,)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["top-2", "flattened"])
def test_an_example_is_the_mean_over_its_tokens_that_pick_an_expert(name):
    p, data = params(), batch()
    stats = jk.value_grad_and_factors(objective_of(WAYS[name]), sharing="reduce")
    factors = jax.jit(stats)(p, data).factors
    assert_factors_close(factors, expected(p, data, sharing="reduce"), 1e-10)
    np.testing.assert_array_equal(factors.a_counts["up"], [2, 0, 2, 2])


@pytest.mark.slow
def test_a_token_that_does_not_exist_reaches_no_expert():
    p, (x, y) = params(), batch()
    positions = jnp.asarray([[True, True, False], [True, False, True]])
    data = x, y, positions
    stats = jax.jit(jk.value_grad_and_factors(objective_of(in_scan_and_remat)))
    factors = stats(p, data, positions=positions).factors
    assert_factors_close(factors, expected(p, data, positions=positions), 1e-10)
    np.testing.assert_array_equal(factors.a_counts["up"], [1, 0, 4, 3])


@pytest.mark.exhaustive
def test_measured_eigenvalues_are_of_each_example_s_gradient():
    p, data = params(), batch()
    objective = objective_of(gathered)
    factors = jk.value_grad_and_factors(objective)(p, data).factors
    found = jk.correct_eigenvalues(objective, jk.eigendecompose(factors))(p, data)
    each = [jax.grad(objective)(p, jax.tree.map(lambda v, n=n: v[n : n + 1], data)) for n in (0, 1)]
    for name in ("up", "down"):
        # The trace of an expert's block: an example's gradient is 3 terms times that of its mean.
        trace = sum(np.square(3 * g[name]).sum((1, 2)) for g in each) / 6
        np.testing.assert_allclose(found[name].raw_values.sum((1, 2)), trace, rtol=1e-9, atol=1e-15)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", WAYS)
def test_scores_are_of_each_example_s_gradient(name):
    p, data = params(), batch()
    objective = objective_of(WAYS[name])
    bases = jk.eigendecompose(jax.jit(jk.value_grad_and_factors(objective))(p, data).factors)
    check_scores(objective, p, data, bases, 1e-10)


def test_kernels_that_read_one_input_share_its_factor_if_they_are_picked_alike():
    def model(p, x):
        up, gate, other = (
            jnp.einsum("nsd,nsdh->nsh", x["x"], p[name][k])
            for name, k in (
                ("up", x["k"][..., 0]),
                ("gate", x["k"][..., 0]),
                ("other", x["k"][..., 1]),
            )
        )
        return jnp.tanh(up) * gate + other

    shape = (EXPERTS, WIDTH, 3)
    layers = jk.find_layers(model, tree(0, up=shape, gate=shape, other=shape), batch()[0])
    assert layers["gate"].shares_input_with == "up" and layers["other"].shares_input_with is None


TABLES = {
    "added": lambda p, x: x["x"] + p["w"][x["k"]].sum((2, 3)),
    "read by a product and as it is": lambda p, x: (
        jnp.einsum("nsd,nskde->nse", x["x"], p["w"][x["k"]]) + p["w"][x["k"]].sum((2, 3))
    ),
    "a function of it": lambda p, x: jnp.einsum("nsd,nskde->nse", x["x"], jnp.exp(p["w"][x["k"]])),
    "their sum": lambda p, x: jnp.einsum("nsd,nsde->nse", x["x"], p["w"][x["k"]].sum(2)),
}


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", TABLES)
def test_matrices_that_no_row_is_multiplied_by_are_rows_of_a_table(name):
    """One block of the table, as it is where a lookup of vectors is read."""
    p, (x, _) = tree(0, w=(EXPERTS, WIDTH, WIDTH)), batch()
    data = x, normal(4, *CHOICES.shape[:2], WIDTH)
    objective = jk.Objective(TABLES[name], jk.Gaussian())
    value, grads, factors = jk.value_grad_and_factors(objective)(p, data)
    assert [layer.kind for layer in factors.layers] == ["embedding"]
    assert_tree_close((value, grads), jax.value_and_grad(objective)(p, data), 1e-10)


@pytest.mark.exhaustive
def test_kfac_steps_through_the_kernels_that_are_picked():
    p, data = params(), batch()
    stats = jk.value_grad_and_factors(objective_of(gathered))
    tx = jk.kfac(0.1, like=stats.factor_shapes(p, data), damping=1e-2)

    @jax.jit
    def step(carry, _):
        p, state = carry
        value, grads, factors = stats(p, data)
        updates, state = tx.update(grads, state, p, factors=factors)
        return (jax.tree.map(jnp.add, p, updates), state), value

    (after, _), values = lax.scan(step, (p, tx.init(p)), length=4)
    assert values[-1] < values[0]
    np.testing.assert_array_equal(after["up"][1], p["up"][1])  # nobody picks this one
