"""What the branch costs beside its products, and its rows at lookups."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac.lslora import Config, EmbeddingAdapter, attach, init, merge

ROWS, IN, OUT, RANK = 64, 48, 40, 3
X = jax.random.normal(jax.random.key(0), (ROWS, IN))
PARAMS = {"kernel": jax.random.normal(jax.random.key(1), (IN, OUT))}


def linear(params, x):
    return x @ params["kernel"]


def made(placement):
    config = Config(rank=RANK, alpha=7.0, fourier_placement=placement, init_sigma=0.7)
    adapters = init(linear, config, PARAMS, X, key=jax.random.key(2))
    b = jax.random.normal(jax.random.key(3), (RANK, OUT))
    return attach(linear, config), {"kernel": adapters["kernel"]._replace(b=b)}


@pytest.mark.default(1, slow=0)
@pytest.mark.parametrize("placement", ["none", "bottleneck"])
def test_nothing_but_the_sum_passes_over_the_outputs(placement):
    """Scaling and sigma multiply the rank's values."""
    adapted, adapters = made(placement)
    jaxpr = jax.make_jaxpr(lambda a: adapted(PARAMS, a, X))(adapters)
    full = [e.primitive.name for e in jaxpr.eqns if e.outvars[0].aval.shape == (ROWS, OUT)]
    assert sorted(full) == ["add", "dot_general", "dot_general"]


def test_on_the_outputs_one_array_is_kept_for_the_backward_pass():
    adapted, adapters = made("output")
    _, pull = jax.vjp(lambda a, x: adapted(PARAMS, a, x), adapters, X)
    kept = [x.shape for x in jax.tree.leaves(pull) if x.size >= ROWS * OUT]
    assert sorted(kept) == [(ROWS, OUT), (ROWS, IN)]  # the second is x itself


@pytest.mark.slow
def test_a_batch_of_adapters_by_vmap_is_each_alone():
    """With the derivative of A written as the transposed product, XLA's CPU backend aborts here."""
    adapted, adapters = made("output")
    many = jax.tree.map(lambda x: jnp.stack([x, 2 * x, 3 * x]), adapters)
    inputs = jnp.stack([X, -X, X[::-1]], 1)

    def gradient(adapters, x):
        return jax.grad(lambda a: jnp.square(adapted(PARAMS, a, x)).sum())(adapters)

    found = jax.jit(jax.vmap(gradient, in_axes=(0, 1)))(many, inputs)
    for i in range(3):
        alone = gradient(jax.tree.map(lambda x: x[i], many), inputs[:, i])  # noqa: B023
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(alone), strict=True):
            np.testing.assert_allclose(x[i], y, rtol=1e-3, atol=1e-3 * jnp.abs(y).max())


@pytest.mark.parametrize("placement", ["none", "bottleneck", "output"])
def test_the_branch_is_the_formula_in_configs_docstring(placement):
    adapted, adapters = made(placement)
    a, b = adapters["kernel"].a, adapters["kernel"].b
    s, phi = 7.0 / RANK, {"none": lambda z: z}.get(placement, lambda z: jnp.tanh(z / (0.7 + 1e-6)))
    branch = phi(s * X @ a @ b) if placement == "output" else s * phi(X @ a) @ b
    expected = X @ PARAMS["kernel"] + branch
    np.testing.assert_allclose(adapted(PARAMS, adapters, X), expected, rtol=1e-5, atol=1e-4)


def _scanned_tables(p, ids):
    def step(x, table):
        return jnp.tanh(x + table[ids]), None

    return jax.lax.scan(step, jnp.zeros((*ids.shape, 5)), p["table"])[0]


LOOKUPS = {
    "rows": ((7, 5), lambda p, ids: jnp.tanh(p["table"][ids])),
    "columns": ((5, 7), lambda p, ids: jnp.tanh(jnp.take(p["table"], ids, axis=1))),
    "transposed": ((5, 7), lambda p, ids: jnp.tanh(p["table"].T[ids])),
    "heads": ((7, 2, 3), lambda p, ids: jnp.tanh(p["table"][ids]).sum(-1)),
    "mapped": ((7, 5), lambda p, ids: jax.vmap(lambda i: p["table"][i])(ids)),
    "scanned": ((3, 7, 5), _scanned_tables),
    "clipped": ((7, 5), lambda p, ids: jnp.take(p["table"], ids + 3, axis=0, mode="clip")),
}


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", LOOKUPS)
def test_a_lookups_branch_is_that_of_the_table_with_the_product_added(name):
    shape, apply_fn = LOOKUPS[name]
    params = {"table": jax.random.normal(jax.random.key(0), shape)}
    ids = jnp.asarray([[0, 3, 6], [5, 5, 1]])
    config = Config(rank=2, alpha=3.0, target="table", fourier_placement="none")
    adapters = init(apply_fn, config, params, ids, key=jax.random.key(1))
    assert isinstance(adapters["table"], EmbeddingAdapter)
    adapted = attach(apply_fn, config)
    np.testing.assert_allclose(adapted(params, adapters, ids), apply_fn(params, ids), atol=1e-6)
    adapters = jax.tree.map(
        lambda x: x + 0.3 * jnp.sin(jnp.arange(x.size)).reshape(x.shape), adapters
    )
    merged = merge(adapted, params, adapters, ids)
    found, expected = adapted(params, adapters, ids), apply_fn(merged, ids)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert np.abs(expected - apply_fn(params, ids)).max() > 0.05
