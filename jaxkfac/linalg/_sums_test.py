"""Sums of many arrays, and one entry that is not finite found wherever it stands."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from jaxkfac.linalg import alike, inner_product, is_all_finite, sum_over_axis

CHECK = jax.jit(is_all_finite)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("shape", "dtype"), [((70, 41), "bfloat16"), ((1001, 1001), "float32")])
def test_an_entry_that_is_not_finite_is_found_at_any_place(bad, shape, dtype):
    """Large arrays go to another library than small ones."""
    whole = np.linspace(-3, 3, np.prod(shape)).astype(dtype).reshape(shape)
    assert CHECK(whole)
    for place in (0, 7, 8, 16, 31, 1000, whole.size // 2, whole.size - 2, whole.size - 1):
        found = whole.copy()
        found.reshape(-1)[place] = bad
        assert not CHECK(found)


def test_the_largest_and_smallest_numbers_are_finite():
    info = np.finfo(np.float32)
    assert CHECK(jnp.array([info.max, info.min, info.smallest_subnormal, 0]))


def test_an_empty_array_is_finite_and_nothing_has_a_derivative():
    assert CHECK(jnp.zeros((0, 3)))
    assert (
        jax.grad(lambda x: jnp.where(is_all_finite(x), x.sum(), 0))(jnp.ones(3)).tolist() == [1] * 3
    )


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
def test_of_several_arrays_one_entry_is_found(bad, dtype):
    """Vectors are joined under jit, and not outside of it."""
    shapes = (40,), (3, 5), (), (1,), (300,), (70000,), (0,)
    whole = [jnp.ones(shape, dtype) for shape in shapes]
    for check in (is_all_finite, jax.jit(is_all_finite)):
        assert check(*whole)
        for i, x in enumerate(whole[:-1]):
            broken = x.reshape(-1).at[-1].set(bad).reshape(x.shape)
            assert not check(*whole[:i], broken, *whole[i + 1 :])
    assert is_all_finite()


@pytest.mark.slow
def test_an_inner_product_is_the_sum_of_all_products_and_has_derivatives(x64):
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = (40,), (3, 5), (), (300,), (7,)
    left = [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]
    left[2] = left[2].astype(jnp.float32)
    right = [x.astype(jnp.float32) ** 2 for x in left]
    expected = sum(np.vdot(x, np.asarray(y, float)) for x, y in zip(left, right, strict=True))

    def of(left, right):
        return inner_product(left, right, jnp.float64)

    many = jax.tree.map(lambda x: x[None], (left, right))
    for found in (of(left, right), jax.jit(of)(left, right), jax.jit(jax.vmap(of))(*many)):
        assert np.allclose(found, expected, rtol=1e-13)
    slopes = jax.jit(jax.grad(of))(left, right)
    assert all(map(np.allclose, slopes, right))
    assert inner_product([], [], jnp.float32).dtype == jnp.float32


@pytest.mark.default(1, slow=0)
@pytest.mark.parametrize("number", [5, 500])
def test_vectors_are_joined_whatever_their_number(number):
    """Each sum of its own is three kernels."""
    vectors = [jax.ShapeDtypeStruct((100 + n,), jnp.float32) for n in range(number)]

    def reductions(function):
        text = jax.jit(function).lower(vectors, vectors).compile().as_text()
        return text.count(" reduce(") + text.count(" reduce-window(")

    assert reductions(lambda x, y: inner_product(x, y, jnp.float32)) <= 3
    assert reductions(lambda x, y: is_all_finite(*x, *y)) <= 2


def test_arrays_that_one_program_cannot_join_stay_by_themselves():
    found = []

    def groups(*arrays):
        found.append(alike(arrays))
        return arrays

    one, half = jnp.ones(2), jnp.ones(3, jnp.bfloat16)
    jax.jit(groups)(one, half, jnp.ones((4, 5)))
    groups(one, one)
    assert found == [[[0, 2], [1]], [[0], [1]]]

    def rows(x, y):
        found.append(alike([x, x, y], [x, y, x]))
        return x

    jax.jit(rows)(one, half)
    assert found[-1] == [[0], [1], [2]]


def test_arrays_that_a_mesh_may_divide_stay_by_themselves():
    """With automatic axes, types do not show how; one device divides nothing."""
    found = []

    def groups(x, y):
        found.append(alike([x, y]))
        return x

    for devices in (2, 1):
        with jax.set_mesh(jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,))):
            jax.jit(groups)(jnp.ones(2), jnp.ones(3))
    assert found == [[[0], [1]], [[0, 1]]]


@pytest.mark.parametrize(("shape", "axis"), [((5,), 0), ((5, 3), 0), ((2, 5, 3, 4), 1)])
def test_a_sum_over_one_axis_is_numpys(shape, axis):
    x = np.random.default_rng(0).normal(size=shape)
    with jax.enable_x64(True):
        np.testing.assert_allclose(sum_over_axis(jnp.asarray(x), axis), x.sum(axis), rtol=1e-14)
