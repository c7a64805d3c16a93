"""Packed factors read, add and average like dense ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkfac.blocks import update_average, zeros_like
from jaxkfac.blocks._random_factors_test import layer, random_factors
from jaxkfac.factors import value_grad_and_factors
from jaxkfac.linalg import diagonal, fold_triangle, unfolded, unfolded_size

LAYERS = (
    layer("a", (63, 64)),
    layer("b", (64, 65), bias="b_b"),
    layer("c", (1, 2)),
    layer("stack", (2, 66, 5), stack=1, bias="stack_b"),
    layer("table", (70, 64), kind="embedding", a_dense=False),
    layer("scale", (70,), kind="scale", inputs=()),
)


@pytest.fixture
def factors():
    return random_factors(LAYERS, jax.random.key(0))


def assert_equal(one, other):
    for name in other:
        for x, y in zip(one[name], other[name], strict=True):
            np.testing.assert_array_equal(x, y)


def shapes_of(factors):
    return [x.shape for x in jax.tree.leaves(factors)]


@pytest.mark.slow
def test_sides_from_64_on_are_packed_and_every_reading_is_dense(factors):
    packed = jax.jit(lambda x: x.packed())(factors)
    folded = {(*place,) for place, side in packed.sides.items() if side.is_packed}
    assert folded == {("a", "b"), ("a", "stack"), ("g", "a"), ("g", "b"), ("g", "table")}
    assert_equal(packed, factors)
    assert_equal(packed.unpacked(), factors)
    assert packed.is_packed and not factors.is_packed and not packed.unpacked().is_packed
    shapes = jax.eval_shape(lambda: factors).packed()
    assert shapes_of(packed) == shapes_of(shapes)


@pytest.mark.slow
def test_sums_and_averages_of_packed_factors_are_packed(factors):
    packed = factors.packed()
    assert_equal(packed + packed, factors + factors)
    assert_equal(packed + factors, factors + factors)  # stored like the first
    assert (packed + factors).is_packed and not (factors + packed).is_packed
    average = update_average(zeros_like(packed), factors, 0.9)
    assert average.is_packed
    assert_equal(average, update_average(zeros_like(factors), factors, 0.9))


def test_numpy_stays_numpy(factors):
    factors = jax.tree.map(np.asarray, factors)
    packed = factors.packed()
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(packed))
    assert_equal(packed, factors)


@pytest.mark.default(1, slow=1)
@pytest.mark.parametrize("n", [1, 2, 63, 64, 65])
def test_size_and_diagonal_of_folded_matrices(n):
    x = jax.random.normal(jax.random.key(n), (3, n, n))
    x = x + x.mT
    for matrix in (x, fold_triangle(x), fold_triangle(np.asarray(x))):
        assert unfolded_size(matrix) == n
        np.testing.assert_array_equal(diagonal(matrix), jnp.diagonal(x, axis1=1, axis2=2))
        np.testing.assert_array_equal(unfolded(matrix), x)


def test_of_a_matrix_that_is_not_symmetric_the_lower_triangle_counts(factors):
    factors.g_sums["a"] = factors.g_sums["a"].at[0, 5].set(1e3)
    read = factors.packed().unpacked().g_sums["a"]
    assert read[0, 5] == read[5, 0] == factors.g_sums["a"][5, 0]


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("fisher", ["empirical", "mc", "exact", "forward"])
def test_the_collector_packs_what_it_would_return(fisher):
    from jaxkfac.factors import Categorical, Objective

    def model(params, x):
        def block(x, p):
            return jnp.tanh(x @ p["w"] + p["b"]), None

        x, _ = jax.lax.scan(block, x, params["blocks"])
        return x @ params["out"]

    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "blocks": {"w": jax.random.normal(keys[0], (2, 66, 66)) / 8, "b": jnp.ones((2, 66))},
        "out": jax.random.normal(keys[1], (66, 3)),
    }
    batch = jax.random.normal(keys[2], (4, 66)), jnp.arange(4) % 3
    calls = {
        packed: value_grad_and_factors(
            Objective(model, Categorical()), fisher=fisher, packed=packed
        )
        for packed in (False, True)
    }
    key = keys[3] if fisher == "mc" else None
    found, expected = (jax.jit(calls[x])(params, batch, key).factors for x in (True, False))
    assert found.is_packed and not expected.is_packed
    shapes = calls[True].factor_shapes(params, batch, key)
    assert shapes_of(found) == shapes_of(shapes)
    for name in expected:
        for x, y in zip(found[name], expected[name], strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)


def readings(factors):
    """What users read of factors, as arrays."""
    return {name: tuple(factors[name]) for name in factors}


def divided(factors):
    """Stacks of two divided over two devices; all else on both."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    of = lambda x: P("x") if x.ndim and x.shape[0] == 2 else P()
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, of(x))), factors)


def twice(factors):
    """Two sets of factors in one tree."""
    return jax.tree.map(lambda x: jnp.stack([x, 2 * x]), factors)


def donated(factors):
    """Read from copies, which are gone afterwards."""
    copies = jax.tree.map(jnp.copy, factors)
    out = jax.jit(lambda x: (readings(x), x), donate_argnums=0)(copies)[0]
    assert all(x.is_deleted() for x in jax.tree.leaves(copies))
    return out


READ = {
    "jit": jax.jit(readings),
    "scan": lambda f: jax.lax.scan(lambda carry, x: (carry, readings(x)), 0, twice(f))[1],
    "vmap": lambda f: jax.vmap(readings)(twice(f)),
    "sharded": lambda f: readings(divided(f)),
    "sharded, jit": lambda f: jax.jit(readings)(divided(f)),
    "donated": donated,
}


@pytest.mark.default(1, slow=2)
@pytest.mark.parametrize("how", READ)
def test_readings_of_packed_factors_are_dense_under(factors, how):
    expected, found = READ[how](factors), READ[how](factors.packed())
    assert found["b"][0].shape[-2:] == (65, 65)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
