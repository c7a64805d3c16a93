import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkfac._errors import NonFiniteFactorError
from jaxkfac.linalg.spectral import (
    HostSpectrum,
    check_square,
    clip_eigenvalues,
    eigh_checked,
    eigh_clipped,
    eigh_in_turn,
    eigh_on_host,
    from_spectrum,
)
from jaxkfac.linalg.spectral import _eigh_host as module

pytestmark = pytest.mark.usefixtures("x64")


def gram(seed, n, rank=None, stack=(), dtype=np.float64):
    x = np.random.default_rng(seed).normal(size=(*stack, n, rank or n)).astype(dtype)
    return jnp.asarray(x @ np.swapaxes(x, -1, -2))


@settings(max_examples=20, deadline=None)
@given(n=st.integers(1, 6), rank=st.integers(1, 6), condition=st.floats(1, 1e8))
def test_clipping_bounds_the_condition_number_and_keeps_what_is_above(n, rank, condition):
    m = gram(n * 7 + rank, n, rank)
    out = eigh_clipped(m, max_condition=condition)
    raw, _ = eigh_checked(m)
    threshold = raw.max() / condition
    assert out.values.min() >= threshold * (1 - 1e-12)
    kept = raw >= threshold
    assert jnp.array_equal(jnp.where(kept, out.values, 0), jnp.where(kept, raw, 0))
    assert out.num_raised == (~kept).sum()


def test_unclipped_decomposition_rebuilds_every_matrix_of_a_stack():
    m = gram(0, 5, stack=(2, 3))
    out = eigh_clipped(m, max_condition=jnp.inf)
    assert jnp.allclose(from_spectrum(out.values, out.vectors), m, rtol=0, atol=1e-12)
    assert out.values.shape == (2, 3, 5) and out.num_raised.shape == (2, 3)
    assert bool(out.is_finite.all())


def test_floor_raises_what_the_condition_number_leaves():
    values = jnp.array([-1e-9, 0.0, 0.5, 2.0])
    assert jnp.array_equal(clip_eigenvalues(values, 100.0, 0.1), jnp.array([0.1, 0.1, 0.5, 2.0]))
    assert jnp.array_equal(clip_eigenvalues(values, 4.0), jnp.array([0.5, 0.5, 0.5, 2.0]))


def test_zero_and_slightly_negative_matrices_clip_to_zero():
    assert jnp.array_equal(clip_eigenvalues(jnp.zeros(3)), jnp.zeros(3))
    assert jnp.array_equal(clip_eigenvalues(jnp.array([-1e-12, -1e-15])), jnp.zeros(2))
    assert jnp.array_equal(eigh_clipped(jnp.zeros((1, 1))).values, jnp.zeros(1))


@pytest.mark.parametrize("triangle", [(0, 2), (2, 0)])
def test_nan_in_either_triangle_shows_in_the_graph(triangle):
    bad = gram(1, 3, stack=(2,)).at[(1, *triangle)].set(jnp.nan)
    out = jax.jit(eigh_clipped)(bad)
    assert out.is_finite.tolist() == [True, False]
    assert jnp.isnan(out.values[1]).all() and jnp.isfinite(out.values[0]).all()


@pytest.mark.parametrize("triangle", [(0, 2), (2, 0)])
def test_nan_in_either_triangle_raises_on_the_host_naming_the_layer(triangle):
    bad = gram(1, 3, stack=(2,)).at[(1, *triangle)].set(jnp.nan)
    with pytest.raises(NonFiniteFactorError, match=r"up/kernel at stack index \(1,\) holds 1 NaN"):
        eigh_on_host(bad, name="up/kernel")


def test_a_matrix_that_is_not_stacked_has_no_index_in_the_message():
    with pytest.raises(NonFiniteFactorError, match="factor up/kernel holds 1 NaN"):
        eigh_on_host(gram(1, 3).at[0, 2].set(jnp.nan), name="up/kernel")


def test_matrices_in_turn_are_decomposed_each_as_by_itself():
    matrices = [gram(5, 4), gram(6, 3, stack=(2,)), gram(7, 4).at[0, 1].set(jnp.nan), gram(8, 4)]
    for i, (m, got) in enumerate(zip(matrices, eigh_in_turn(matrices), strict=True)):
        assert bool(jnp.isnan(got.values).all()) == (i == 2)  # NaN does not reach the next
        if i != 2:
            assert jnp.allclose(from_spectrum(*got), m, rtol=0, atol=1e-12)
    assert all(got.vectors is None for got in eigh_in_turn(matrices, vectors=False))


def test_matrices_in_turn_depend_each_on_the_one_before():
    seen = jax.make_jaxpr(lambda *m: [s.values for s in eigh_in_turn(m)])(jnp.eye(2), jnp.eye(2))
    first, second = (e for e in seen.jaxpr.eqns if "eigh_after" in str(e.params.get("name")))
    assert set(map(id, first.outvars)) & set(map(id, second.invars))


@pytest.mark.default(2, slow=0)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("vectors", [True, False])
def test_host_and_graph_agree(dtype, vectors):
    m = gram(2, 4, stack=(3,), dtype=dtype)
    host, graph = eigh_on_host(m, name="", vectors=vectors), eigh_checked(m, vectors=vectors)
    assert host.values.dtype == dtype
    assert np.allclose(host.values, graph.values, atol=50 * np.finfo(dtype).eps)
    assert (host.vectors is None) == (graph.vectors is None) == (not vectors)
    if vectors:
        assert np.allclose(
            from_spectrum(*map(jnp.asarray, host)), m, atol=100 * np.finfo(dtype).eps
        )


def test_float64_numpy_input_stays_float64_where_jax_has_no_x64():
    m = np.diag([1.0, 1.0 + 1e-12])
    with jax.enable_x64(False):
        assert np.ptp(eigh_on_host(m, name="").values) == pytest.approx(1e-12, rel=1e-3)


def _failing(matrix, *, dtype=None):
    del dtype
    return HostSpectrum(np.full(matrix.shape[:-1], np.nan), np.full(matrix.shape, np.nan))


def test_host_retries_with_numpy_when_lapack_fails(monkeypatch):
    monkeypatch.setattr(module, "_lapack", _failing)
    m = gram(3, 4, stack=(2,), dtype=np.float32)
    out = eigh_on_host(m, name="x")
    assert out.values.dtype == np.float32
    assert np.allclose(from_spectrum(*map(jnp.asarray, out)), m, atol=1e-5)
    assert np.array_equal(eigh_on_host(m, name="x", vectors=False).values, out.values)


@pytest.mark.parametrize("stack", [(), (2,)])
def test_host_decomposes_single_precision_in_double_and_rounds(stack):
    m = np.asarray(gram(9, 40, stack=stack, dtype=np.float32))
    with jax.enable_x64(False):  # as users have it
        values, vectors = eigh_on_host(m, name="")
        alone = eigh_on_host(m, name="", vectors=False)
        single = eigh_on_host(m, name="", dtype=np.float32)
    exact = np.linalg.eigvalsh(m.astype(np.float64))
    # To the last digit, the smallest as well; in float32 those are off by thousands of digits.
    assert np.allclose(values, exact, rtol=2e-7, atol=1e-13 * exact.max())
    assert not np.allclose(single.values, exact, rtol=2e-7, atol=1e-13 * exact.max())
    assert values.dtype == vectors.dtype == single.values.dtype == np.float32
    assert np.array_equal(alone.values, values) and alone.vectors is None


def test_an_unknown_dtype_of_the_host_is_named():
    with pytest.raises(ValueError, match="dtype must be one of.*got 'bfloat16'"):
        eigh_on_host(gram(3, 4), name="x", dtype=jnp.bfloat16)


def test_host_names_the_layer_when_every_retry_fails(monkeypatch):
    monkeypatch.setattr(module, "_lapack", _failing)
    monkeypatch.setattr(module, "_numpy_float64", _failing)
    with pytest.raises(NonFiniteFactorError, match="up/kernel is finite but its eigen"):
        eigh_on_host(gram(3, 4), name="up/kernel")


def test_host_works_without_a_cpu_backend(monkeypatch):
    def no_cpu(platform):
        raise RuntimeError(platform)

    m = gram(4, 3)
    monkeypatch.setattr(module.jax, "devices", no_cpu)
    assert np.allclose(from_spectrum(*map(jnp.asarray, eigh_on_host(m, name=""))), m)


def test_bad_arguments_are_named():
    eye = jnp.eye(2)
    for bad in (0.5, float("nan")):
        with pytest.raises(ValueError, match="max_condition must be at least 1"):
            eigh_clipped(eye, max_condition=bad)
    with pytest.raises(ValueError, match="floor must be zero or positive, got -1"):
        clip_eigenvalues(jnp.ones(2), 10.0, -1.0)
    with pytest.raises(ValueError, match=r"square.*\(2, 3\)"):
        check_square(jnp.ones((2, 3)))
    with pytest.raises(ValueError, match="float32 or float64 to decompose, got bfloat16"):
        eigh_checked(eye.astype(jnp.bfloat16))
