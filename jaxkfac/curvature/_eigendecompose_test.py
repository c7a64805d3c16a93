import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac._errors import NonFiniteFactorError, UnknownLayerError
from jaxkfac.blocks import zeros_like
from jaxkfac.blocks._random_factors_test import layer, random_factors
from jaxkfac.curvature import _eigendecompose as module
from jaxkfac.curvature import _placement as host_module
from jaxkfac.curvature import eigendecompose, identity_bases, reconstruct
from jaxkfac.curvature._placement import matrices_that_fit
from jaxkfac.factors import Categorical, Objective, value_grad_and_factors
from jaxkfac.linalg.spectral import Spectrum

LAYERS = (
    layer("q", (3, 4), bias="q_bias"),
    layer("k", (3, 4), input="q"),
    layer("v", (3, 4), input="q"),
    layer("stacked", (2, 4, 3), bias="stacked_bias", stack=1),
    layer("table", (6, 3), kind="embedding", a_dense=False),
    layer("scale", (2, 4), kind="scale", stack=1, inputs=(), g_dense=False),
    layer("one", (1, 1)),
)


pytestmark = pytest.mark.usefixtures("x64")


@pytest.fixture
def factors():
    return random_factors(LAYERS, jax.random.key(0))


def assert_close(a, b, tol=1e-10):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert jnp.allclose(x, y, rtol=tol, atol=tol), (x, y)


def assert_rebuilds(bases, factors, tol=1e-10):
    rebuilt = reconstruct(bases)
    assert list(rebuilt) == list(factors)
    for name in factors:
        assert_close(rebuilt[name], factors[name], tol)


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("placement", ["auto", "device", "host"])
@pytest.mark.parametrize("bias", ["joint", "separate"])
def test_unclipped_bases_rebuild_the_factors(placement, bias):
    factors = random_factors(LAYERS, jax.random.key(0), bias=bias)
    assert_rebuilds(eigendecompose(factors, max_condition=jnp.inf, placement=placement), factors)


@pytest.mark.default(1, slow=0)
@pytest.mark.parametrize("accelerator", [True, False])
def test_each_distinct_factor_is_decomposed_once(factors, monkeypatch, accelerator):
    calls = []
    batched, on_host = module.eigh_checked, host_module.eigh_on_host

    def counted(matrix, **kwargs):
        calls.append(matrix.shape)
        return batched(matrix, **kwargs)

    def counted_on_host(matrix, **kwargs):
        calls.append(matrix.shape)
        return on_host(matrix, **kwargs)

    monkeypatch.setattr(module, "eigh_checked", counted)
    monkeypatch.setattr(host_module, "eigh_on_host", counted_on_host)
    if accelerator:  # where the room for workspace is known
        monkeypatch.setattr(module, "matrices_that_fit", lambda *_: 100)
    bases = eigendecompose(factors)
    # size 4: A of q with its ones, G of q, k, v. Size 3: A of q without, 2 G's of the stack,
    # G of the table. Size 5: 2 A's of the stack. Size 1: A and G of "one".
    if accelerator:  # one call per size
        assert sorted(calls) == [(2, 1, 1), (2, 5, 5), (4, 3, 3), (4, 4, 4)]
    else:
        alone = [(1, 1)] * 2 + [(3, 3)] * 2 + [(4, 4)] * 4
        assert sorted(calls) == sorted([*alone, (2, 3, 3), (2, 5, 5)])
    assert bases["k"].a_vectors is bases["v"].a_vectors
    assert set(bases.a) == {"q", "stacked", "table", "one"} and set(bases.a_without_ones) == {"q"}


def test_an_accelerators_program_decomposes_each_size_in_one_call(factors):
    traced = jax.jit(eigendecompose).trace(factors)
    lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in lowered.splitlines() if "custom_call" in line and "syevd" in line]
    assert len(calls) == len({3, 4, 5, 1}), calls
    on_cpu = traced.lower(lowering_platforms=("cpu",)).as_text()
    assert "syevd" in on_cpu and "cusolver" not in on_cpu


def test_layer_without_bias_has_the_eigenvalues_of_the_factor_without_ones(factors):
    bases = eigendecompose(factors, max_condition=jnp.inf)
    full = factors.a_sums["q"] / factors.a_counts["q"]
    assert_close(bases["q"].a_values, jnp.linalg.eigvalsh(full))
    assert_close(bases["k"].a_values, jnp.linalg.eigvalsh(full[:-1, :-1]))


def test_values_are_clipped_on_read_and_stored_raw(factors):
    basis = eigendecompose(factors, max_condition=2.0)["table"]
    assert jnp.array_equal(basis.a_raw_values, factors["table"].a)
    assert jnp.array_equal(
        basis.a_values, jnp.maximum(factors["table"].a, factors["table"].a.max() / 2)
    )
    assert basis.a_vectors is None
    assert_close(basis.g_values.max() / basis.g_values.min(), jnp.asarray(2.0))
    assert basis.g_raw_values.max() / basis.g_raw_values.min() > 2.5


def test_diagonals_are_clipped_per_stacked_slice(factors):
    basis = eigendecompose(factors, max_condition=1.5)["scale"]
    raw = factors["scale"].diagonal
    expected = jnp.maximum(raw, raw.max(-1, keepdims=True) / 1.5)
    assert not jnp.array_equal(expected, jnp.maximum(raw, raw.max() / 1.5))
    assert jnp.array_equal(basis.diagonal, expected) and jnp.array_equal(basis.raw_diagonal, raw)


@pytest.mark.exhaustive
def test_jit_scan_and_cond_agree_with_eager(factors):
    eager = eigendecompose(factors)
    decompose = lambda f: reconstruct(eigendecompose(f))
    assert_close(jax.jit(decompose)(factors), reconstruct(eager))
    _, scanned = jax.lax.scan(
        lambda c, f: (c, decompose(f)), 0, jax.tree.map(lambda x: jnp.stack([x, 2 * x]), factors)
    )
    assert_close(jax.tree.map(lambda x: x[1], scanned), reconstruct(eager))
    # The two branches also show that identity_bases has the right structure.
    chosen = jax.lax.cond(jnp.asarray(True), eigendecompose, identity_bases, factors)
    assert_close(reconstruct(chosen), reconstruct(eager))


@pytest.mark.slow
def test_rank_deficient_and_empty_factors_decompose(factors):
    one_row = random_factors(LAYERS, jax.random.key(1), rows=1)
    bases = eigendecompose(one_row, max_condition=jnp.inf)
    assert all(bases.is_finite().values())
    assert bases["q"].a_values.min() >= 0 and (bases["q"].a_values > 1e-12).sum() == 1
    empty = eigendecompose(zeros_like(factors))
    assert all(bool((v == 0).all()) for v in (empty["q"].a_values, empty["scale"].diagonal))


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("placement", ["auto", "device", "host"])
def test_vectors_false_keeps_the_same_values_bit_by_bit(factors, placement, dtype):
    factors = jax.tree.map(lambda x: x.astype(jnp.float32), factors)
    options = {"placement": placement, "dtype": dtype}
    with_vectors = eigendecompose(factors, **options)
    without = eigendecompose(factors, vectors=False, **options)
    values = lambda bases: jax.tree.leaves(
        [s.values for table in (bases.a, bases.a_without_ones, bases.g) for s in table.values()]
    )
    for x, y in zip(values(with_vectors), values(without), strict=True):
        assert x.dtype == jnp.float32 and np.array_equal(x, y)
    assert without["stacked"].g_vectors is None and without["q"].a_vectors is None
    with pytest.raises(ValueError, match="no eigenvectors of layer 'q'.*vectors=True"):
        reconstruct(without)


def with_nan(factors, name):
    bad = {**factors.g_sums, name: factors.g_sums[name].at[..., 0, 2].set(jnp.nan)}
    return dataclasses.replace(factors, g_sums=bad)


@pytest.mark.parametrize("placement", ["auto", "host"])
def test_nan_raises_outside_a_trace_naming_the_layer(factors, placement):
    with pytest.raises(NonFiniteFactorError, match="G of layer 'stacked'"):
        eigendecompose(with_nan(factors, "stacked"), placement=placement)


@pytest.mark.slow
def test_nan_is_a_field_of_the_result_inside_jit_and_on_the_device(factors):
    bad = with_nan(factors, "k")
    for bases in (jax.jit(eigendecompose)(bad), eigendecompose(bad, placement="device")):
        finite = {name: bool(ok) for name, ok in bases.is_finite().items()}
        assert finite == {x.name: x.name != "k" for x in LAYERS}


def test_an_offloaded_factor_is_in_no_batch_with_those_on_the_device(factors, monkeypatch):
    """G of k and G of q have one size, and their arrays are in different memories."""
    monkeypatch.setattr(module, "matrices_that_fit", lambda *_: 100)
    offloaded = lambda x: x.sharding.memory_kind == "pinned_host"
    monkeypatch.setattr(module, "is_on_host", offloaded)
    (device,) = factors.g_sums["k"].devices()
    there = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    mean_of = module.block_mean

    def mean(all_factors, block):
        found = mean_of(all_factors, block)
        return jax.device_put(found, there) if block.name == "G of layer 'k'" else found

    monkeypatch.setattr(module, "block_mean", mean)
    found = eigendecompose(factors)
    monkeypatch.undo()
    assert_close(np.asarray(found.g["k"].values), np.asarray(eigendecompose(factors).g["k"].values))


def test_a_failed_solver_is_retried_on_the_host(factors, monkeypatch):
    def failing(matrix, *, vectors):
        nan = jnp.full(matrix.shape[:-1], jnp.nan)
        return Spectrum(nan, jnp.full(matrix.shape, jnp.nan) if vectors else None)

    monkeypatch.setattr(module, "eigh_checked", failing)
    assert_rebuilds(eigendecompose(factors, max_condition=jnp.inf), factors)


class _Device:
    def __init__(self, stats):
        self.memory_stats = lambda: stats


def test_half_of_the_free_memory_limits_the_batch():
    device = _Device({"bytes_limit": 10_000, "bytes_in_use": 4_000})
    assert matrices_that_fit(10, np.float32, device) == 2  # 3000 // (3 * 100 * 4)
    assert matrices_that_fit(10, np.float64, device) == 1
    assert matrices_that_fit(100, np.float32, device) == 0
    assert matrices_that_fit(100, np.float32, _Device(None)) is None


@pytest.mark.default(1, slow=0)
@pytest.mark.sampled(2)
@pytest.mark.parametrize("limit", [0, 1, 2, 3])
def test_a_small_device_decomposes_every_factor_all_the_same(factors, monkeypatch, limit):
    on_host, sizes = [], []
    host, device = host_module.eigh_on_host, module.eigh_checked
    monkeypatch.setattr(module, "matrices_that_fit", lambda *_: limit)
    monkeypatch.setattr(
        host_module, "eigh_on_host", lambda m, **k: on_host.append(k["name"]) or host(m, **k)
    )
    monkeypatch.setattr(
        module, "eigh_checked", lambda m, **k: sizes.append(len(m)) or device(m, **k)
    )
    assert_rebuilds(eigendecompose(factors, max_condition=jnp.inf), factors)
    assert (len(on_host) == 10) if limit == 0 else (max(sizes) == limit and not on_host)


@pytest.mark.slow
def test_host_results_return_to_the_factors_device_and_dtype():
    factors = random_factors(LAYERS, jax.random.key(0), dtype=jnp.float32)
    committed = jax.device_put(factors, jax.devices()[0])
    for given in (factors, committed):
        values = eigendecompose(given, placement="host")["q"].a_raw_values
        assert values.dtype == jnp.float32
        assert values.committed == given.a_sums["q"].committed


def test_bad_arguments_are_named(factors):
    with pytest.raises(ValueError, match="max_condition"):
        eigendecompose(factors, max_condition=0.9)
    with pytest.raises(ValueError, match="floor"):
        eigendecompose(factors, floor=-1e-3)
    with pytest.raises(ValueError, match="placement='host' needs concrete factors"):
        jax.jit(lambda f: eigendecompose(f, placement="host"))(factors)
    with pytest.raises(UnknownLayerError, match="no layer 'stackd'.*'stacked'"):
        eigendecompose(factors)["stackd"]


def test_the_square_of_a_diagonal_side_is_never_formed():
    vocabulary = 2**22  # its square would be 64 TiB
    objective = Objective(lambda p, x: p["embedding"][x] @ p["head"], Categorical())
    shape = jax.ShapeDtypeStruct
    params = {
        "embedding": shape((vocabulary, 4), jnp.float32),
        "head": shape((4, 3), jnp.float32),
    }
    ids = shape((5,), jnp.int32)
    like = value_grad_and_factors(objective).factor_shapes(params, (ids, ids))
    bases = identity_bases(like)
    assert bases["embedding"].a_values.shape == (vocabulary,)


@pytest.mark.default(1, slow=0)
@pytest.mark.parametrize("limit", [None, 2])
def test_a_batch_for_an_accelerator_has_the_spectrum_of_each_matrix(limit):
    rows = jax.random.normal(jax.random.key(0), (6, 9, 4))
    moments = rows.mT @ rows
    for matrices in ([moments[:3], moments[3], moments[4:]], [moments[0]]):
        spectra = module._batched(matrices, limit=limit, vectors=True)
        for matrix, (values, vectors) in zip(matrices, spectra, strict=True):
            np.testing.assert_allclose(values, np.linalg.eigvalsh(matrix), rtol=1e-12)
            rebuilt = (vectors * values[..., None, :]) @ vectors.mT
            np.testing.assert_allclose(rebuilt, matrix, rtol=1e-10, atol=1e-12)
