import jax
import jax.numpy as jnp
import pytest

from jaxkfac.linalg.spectral import (
    check_damping,
    diagonal_power,
    eigh_checked,
    kronecker_power,
    power_or_zero,
    quadratic_form,
    scale_in_eigenbasis,
)

# mode, damping, and the damped factors (or block) it stands for
TAU, DELTA_A, DELTA_G = 0.3, 0.2, 0.7


pytestmark = pytest.mark.usefixtures("x64")


def pair(seed=0, n=3, m=4, stack=()):
    k_a, k_g, k_w = jax.random.split(jax.random.key(seed), 3)
    x, y = jax.random.normal(k_a, (*stack, 9, n)), jax.random.normal(k_g, (*stack, 9, m))
    return x.mT @ x, y.mT @ y, jax.random.normal(k_w, (*stack, n, m))


def damped_dense(a, g, damping, mode):
    """The damped (in * out) square matrix acting on the row-major vectorisation of W."""
    eye_a, eye_g = jnp.eye(len(a)), jnp.eye(len(g))
    if isinstance(damping, tuple):
        return jnp.kron(a + damping[0] * eye_a, g + damping[1] * eye_g)
    if mode == "exact":
        return jnp.kron(a, g) + damping * jnp.eye(len(a) * len(g))
    pi = 1.0
    if mode == "pi":
        pi = jnp.sqrt((jnp.trace(a) / len(a)) / (jnp.trace(g) / len(g)))
    root = jnp.sqrt(damping)
    return jnp.kron(a + pi * root * eye_a, g + root / pi * eye_g)


def dense_power(matrix, power):
    values, vectors = jnp.linalg.eigh(matrix)
    return (vectors * values**power) @ vectors.T


def apply(a, g, w, **kwargs):
    (a_values, a_vectors), (g_values, g_vectors) = eigh_checked(a), eigh_checked(g)
    scale = kronecker_power(a_values, g_values, **kwargs).product
    return scale_in_eigenbasis(w, scale, a_vectors, g_vectors)


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("power", [-1.0, -0.5, 0.5, 1.0, 2.0])
@pytest.mark.parametrize(
    ("mode", "damping"),
    [("exact", TAU), ("factored", TAU), ("pi", TAU), ("exact", (DELTA_A, DELTA_G))],
)
def test_damped_power_equals_the_dense_kronecker_matrix(mode, damping, power):
    a, g, w = pair()
    expected = dense_power(damped_dense(a, g, damping, mode), power) @ w.reshape(-1)
    got = apply(a, g, w, power=power, damping=damping, mode=mode)
    assert jnp.allclose(got.reshape(-1), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.exhaustive
def test_a_stack_is_its_slices_even_for_pi():
    a, g, w = pair(stack=(3,))
    whole = apply(a, g, w, power=-1.0, damping=TAU, mode="pi")
    slices = [apply(a[i], g[i], w[i], power=-1.0, damping=TAU, mode="pi") for i in range(3)]
    assert jnp.allclose(whole, jnp.stack(slices), rtol=1e-12)


def test_no_vectors_is_the_identity_basis():
    a, g, w = pair()
    values = jnp.diag(a)
    dense = apply(jnp.diag(values), g, w, power=-1.0, damping=TAU)
    g_values, g_vectors = eigh_checked(g)
    scale = kronecker_power(values, g_values, power=-1.0, damping=TAU).product
    assert jnp.allclose(scale_in_eigenbasis(w, scale, None, g_vectors), dense, rtol=1e-10)


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("kept", [(3, 4), (2, 4), (3, 2), (1, 3)])
def test_a_quadratic_form_is_the_matrix_times_what_scaling_makes_of_it(kept):
    a, g, w = pair(stack=(2,))
    vectors = [eigh_checked(x)[1][..., -n:] for x, n in zip((a, g), kept, strict=True)]
    scale = jax.random.uniform(jax.random.key(1), (2, 3, 4))
    for a_vectors, g_vectors in (vectors, (None, vectors[1]), (vectors[0], None)):
        scaled = scale_in_eigenbasis(w, scale, a_vectors, g_vectors)
        found = quadratic_form(w, scale, a_vectors, g_vectors)
        assert found.shape == (2,)
        assert jnp.allclose(found, (w * scaled).sum((1, 2)), rtol=1e-12)


@pytest.mark.default(6, slow=2)
@pytest.mark.parametrize("power", [-1.0, -0.5, 0.0, 1.0])
@pytest.mark.parametrize("mode", ["exact", "factored", "pi"])
def test_zero_eigenvalue_without_damping_gives_zero(mode, power):
    scale = kronecker_power(
        jnp.array([0.0, 2.0]), jnp.array([0.0, 4.0]), power=power, mode=mode
    ).product
    assert jnp.allclose(scale, jnp.array([[0.0, 0.0], [0.0, 8.0**power]]), rtol=1e-14)


@pytest.mark.parametrize("mode", ["exact", "factored", "pi"])
def test_zero_factor_with_damping_is_the_damping_alone(mode):
    scale = kronecker_power(jnp.zeros(2), jnp.zeros(3), power=-1.0, damping=4.0, mode=mode).product
    assert jnp.allclose(scale, 0.25 * jnp.ones((2, 3)))


def test_nan_is_not_taken_for_zero():
    assert jnp.isnan(kronecker_power(jnp.array([jnp.nan]), jnp.ones(1), power=-1.0).product).all()
    assert jnp.isnan(power_or_zero(jnp.array([jnp.nan]), -0.5)).all()


def test_negative_rounding_counts_as_zero():
    a = jnp.array([-1e-9, 1.0])
    assert jnp.array_equal(
        kronecker_power(a, jnp.ones(1), power=0.5).product, jnp.array([[0.0], [1.0]])
    )


def test_a_diagonal_adds_the_second_of_a_pair():
    values = jnp.array([0.0, 1.0])
    assert jnp.allclose(diagonal_power(values, power=-1.0, damping=0.5), jnp.array([2.0, 1 / 1.5]))
    assert jnp.allclose(
        diagonal_power(values, power=-1.0, damping=(9.0, 0.5)), jnp.array([2.0, 1 / 1.5])
    )


def test_traced_damping_of_another_dtype_keeps_the_factors_dtype():
    values = jnp.ones(2, jnp.float32)
    traced = jax.jit(lambda d: kronecker_power(values, values, power=-1.0, damping=d).product)
    assert traced(jnp.float64(1.0)).dtype == jnp.float32


@pytest.mark.parametrize("bad", [-1e-3, float("nan"), (1.0, -1.0)])
def test_negative_damping_is_refused(bad):
    with pytest.raises(ValueError, match="damping must be zero or positive"):
        kronecker_power(jnp.ones(1), jnp.ones(1), power=-1.0, damping=bad)


@pytest.mark.parametrize("shape", [(1,), (2,), (3, 2)])
def test_damping_that_is_no_number_is_refused_inside_and_outside_jit(shape):
    """It would broadcast against the eigenvalues."""

    def power(damping):
        check_damping(damping, "exact")  # below the runtime type hook of kronecker_power
        return damping

    for call in (power, jax.jit(power), jax.jit(lambda d: power((d, d)))):
        with pytest.raises(ValueError, match="expected a number, or a pair .* as a tuple"):
            call(jnp.ones(shape))


def test_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="damping_mode must be one of"):
        check_damping(0.1, "both")  # below the runtime type hook of kronecker_power


@pytest.mark.parametrize("power", [-1.0, 1.0, 2.0])
@pytest.mark.parametrize(
    ("mode", "damping"),
    [("exact", TAU), ("factored", TAU), ("pi", TAU), ("exact", (DELTA_A, DELTA_G))],
)
def test_powers_of_two_of_the_eigenvalues_and_dampings_scale_the_power_exactly(
    mode, damping, power
):
    a, g = jnp.array([0.3, 1.7, 5.1]), jnp.array([0.0, 0.9, 2.3, 7.7])
    unit = 2.0**20
    scaled = tuple(d * unit for d in damping) if isinstance(damping, tuple) else damping * unit**2
    plain = kronecker_power(a, g, power=power, damping=damping, mode=mode).product
    times = kronecker_power(a * unit, g * unit, power=power, damping=scaled, mode=mode)
    assert jnp.array_equal(times.product, plain * unit ** (2 * power))
