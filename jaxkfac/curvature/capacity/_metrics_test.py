"""Every metric against the eigenvalues written out, in float64."""

import copy
import dataclasses
import inspect
import json
import math
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkfac._errors import NonFiniteFactorError, UnknownLayerError
from jaxkfac.blocks import Corrections
from jaxkfac.blocks._random_factors_test import layer, random_factors
from jaxkfac.curvature import Eigenbases, eigendecompose
from jaxkfac.curvature.capacity import (
    METRICS,
    CapacityRecord,
    capacity_interval,
    capacity_metrics,
    compare_capacity,
)
from jaxkfac.curvature.capacity._metrics import scales
from jaxkfac.linalg.spectral import Spectrum

pytestmark = pytest.mark.usefixtures("x64")

N, DELTA, P, Q = 300, 0.7, (0.5, 2.0, 3.0), (0.0, 0.25, 0.5, 1.0)
LAYERS = (
    layer("q", (3, 4), bias="q_bias"),
    layer("k", (3, 4), input="q"),
    layer("stacked", (2, 4, 3), bias="stacked_bias", stack=1),
    layer("table", (6, 3), kind="embedding", a_dense=False),
    layer("scale", (2, 4), kind="scale", stack=1, inputs=(), g_dense=False),
    layer("one", (1, 1)),
)


def measure(bases, **kwargs):
    return capacity_metrics(
        bases, **{"num_examples": N, "damping": DELTA, "powers": P, "quantiles": Q} | kwargs
    )


def expected(x, n=N, delta=DELTA, threshold=1e-8):
    """The metrics of a list of eigenvalues, each from its definition."""
    x = np.sort(np.maximum(np.asarray(x, float).ravel(), 0))
    positive, p = x[x > 0], x[x > 0] / (x.sum() or 1)
    some, regular = len(positive) > 0, len(positive) == len(x)
    kappa = n / (2 * math.pi * math.log(n))
    entropy = -(p * np.log(p)).sum()
    return {
        "dimension": len(x),
        "num_positive": len(positive),
        "participation_ratio": x.sum() ** 2 / (x**2).sum() if some else 0,
        "spectral_entropy": entropy,
        "entropy_rank": math.exp(entropy) if some else 0,
        "stable_rank": (x**2).sum() / x[-1] ** 2 if some else 0,
        "intrinsic_dimension": x.sum() / x[-1] if some else 0,
        "condition": x[-1] / x[0] if regular else None,
        "local_effective_dimension": (
            np.log(1 + kappa * x / x.mean()).sum() / math.log(kappa) if some else None
        ),
        "trace": x.sum(),
        "frobenius": np.sqrt((x**2).sum()),
        "largest": x[-1],
        "smallest": x[0],
        "log_determinant": np.log(x).sum() if regular else None,
        "log_pseudo_determinant": np.log(positive).sum(),
        "num_above": (x > threshold).sum(),
        "effective_dimension": (n * x / (n * x + delta)).sum() if delta else len(positive),
        "log_determinant_damped": np.log(n * x + delta).sum() if delta or regular else None,
        "pac_bayes_complexity": np.sqrt(x.sum() / n),
        **{f"trace_power_{p:g}": (x**p).sum() for p in P},
        **{f"quantile_{q:g}": np.quantile(x, q, method="inverted_cdf") for q in Q},
    }


def assert_metrics(record, wanted):
    found = record.scalars()
    for name, value in wanted.items():
        if value is None or found[name] is None:
            assert found[name] is value, name
        else:
            np.testing.assert_allclose(found[name], value, rtol=1e-10, atol=1e-13, err_msg=name)


def eigenvalues(bases, name):
    """All eigenvalues of each slice of a layer, ``(slices, n)``, from dense matrices."""
    basis = bases[name]
    if hasattr(basis, "raw_diagonal"):
        return np.asarray(basis.raw_diagonal).reshape(math.prod(basis.raw_diagonal.shape[:-1]), -1)
    a, g = (np.asarray(x) for x in (basis.a_raw_values, basis.g_raw_values))
    kron = lambda a, g: np.kron(np.diag(a), np.diag(g))
    rows = [np.linalg.eigvalsh(kron(a[i], g[i])) for i in np.ndindex(a.shape[:-1])]
    if bases.bias == "separate" and any(x.bias for x in bases.layers if x.name == name):
        rows = [np.concatenate([x, g[i]]) for x, i in zip(rows, np.ndindex(a.shape[:-1]))]
    return np.stack(rows)


def dense(values, max_condition=1e3):
    """Bases of one dense layer (a, g) for each pair of lists."""
    layers = tuple(layer(f"w{i}", (len(a), len(g))) for i, (a, g) in enumerate(values))
    a = {f"w{i}": Spectrum(jnp.asarray(a, float), None) for i, (a, _) in enumerate(values)}
    g = {f"w{i}": Spectrum(jnp.asarray(g, float), None) for i, (_, g) in enumerate(values)}
    return Eigenbases(a, {}, g, {}, layers, "joint", max_condition, 0.0)


@pytest.fixture
def bases():
    return eigendecompose(random_factors(LAYERS, jax.random.key(0)), vectors=False)


spectra = st.lists(st.sampled_from([-1e-12, 0.0, 1e-6, 0.3, 0.5, 1.0, 7.0]), min_size=1, max_size=6)


@pytest.mark.slow
@given(st.lists(st.tuples(spectra, spectra), min_size=1, max_size=3), st.sampled_from([0.0, DELTA]))
def test_metrics_of_products_are_those_of_the_list_of_all_products(values, delta):
    metrics = measure(dense(values), damping=delta)
    lists = [np.kron(*(np.maximum(x, 0) for x in pair)) for pair in values]
    for i, x in enumerate(lists):
        assert_metrics(metrics[f"w{i}"], expected(x, delta=delta))
    assert_metrics(metrics.model, expected(np.concatenate(lists), delta=delta))


@pytest.mark.slow
@pytest.mark.parametrize("bias", ["joint", "separate"])
def test_every_kind_of_block_counts_once_in_the_whole_model(bias):
    bases = eigendecompose(random_factors(LAYERS, jax.random.key(0), bias=bias), vectors=False)
    metrics, lists = measure(bases), {name: eigenvalues(bases, name) for name in bases}
    assert metrics.model.dimension == sum(x.num_parameters for x in LAYERS)
    for name, rows in lists.items():
        assert_metrics(metrics[name], expected(rows))
        assert len(metrics[name].slices) == (2 if name in ("stacked", "scale") else 0)
        for record, row in zip(metrics[name].parts, rows, strict=True):
            assert_metrics(record, expected(row))
    assert_metrics(metrics.model, expected(np.concatenate([x.ravel() for x in lists.values()])))


def test_trace_determinant_and_effective_dimension_are_those_of_the_dense_matrix():
    rng = np.random.default_rng(0)
    a, g = (x.T @ x for x in (rng.normal(size=(9, 4)), rng.normal(size=(9, 3))))
    metrics = measure(dense([(np.linalg.eigvalsh(a), np.linalg.eigvalsh(g))])).model
    fisher, identity = np.kron(a, g), np.eye(12)
    damped = N * fisher + DELTA * identity
    wanted = {
        "trace": np.trace(fisher),
        "frobenius": np.linalg.norm(fisher),
        "condition": np.linalg.cond(fisher),
        "log_determinant": np.linalg.slogdet(fisher)[1],
        "log_determinant_damped": np.linalg.slogdet(damped)[1],
        "effective_dimension": np.trace(np.linalg.solve(damped, N * fisher)),
        "trace_power_3": np.trace(fisher @ fisher @ fisher),
        "stable_rank": (np.linalg.norm(fisher) / np.linalg.norm(fisher, 2)) ** 2,
    }
    assert_metrics(metrics, wanted)


def test_clipping_changes_only_the_clipped_condition():
    pair = [([1e-9, 1.0, 2.0], [0.5, 1.0])]
    hard, soft = (measure(dense(pair, kappa)).model for kappa in (10.0, 1e6))
    assert hard.condition_clipped == pytest.approx(10.0 * 2.0)
    assert soft.condition_clipped == pytest.approx(1e6 * 2.0)
    changed = {k for k, v in hard.scalars().items() if v != soft.scalars()[k]}
    assert changed == {"condition_clipped"}


@pytest.mark.slow
@given(st.lists(st.tuples(spectra, spectra), min_size=1, max_size=3))
def test_scale_free_metrics_do_not_change_with_the_scale(values):
    scaled = [([3.7 * x for x in a], g) for a, g in values]
    one, other = (measure(dense(x)).model.scalars() for x in (values, scaled))
    for name in scales()["scale-free"]:
        assert one[name] == (pytest.approx(other[name]) if other[name] is not None else None), name


def test_each_metric_is_on_one_scale_and_in_the_docstring_of_the_record():
    names = [name for names in scales().values() for name in names]
    assert sorted(names) == sorted(METRICS)
    assert names == re.findall(r"\* ``(\w+)`` \(", CapacityRecord.__doc__)
    assert all(metric.description.endswith(".") for metric in METRICS.values())


def test_an_unknown_metric_is_named_with_the_nearest():
    with pytest.raises(AttributeError, match="no metric 'stable_ranks'; the nearest .*'stable_ran"):
        measure(dense([([1.0], [1.0])])).model.stable_ranks  # noqa: B018


def test_a_record_is_copied_and_pickled_like_any_other():
    record = measure(dense([([1.0, 2.0], [1.0])])).model
    assert copy.copy(record) == pickle.loads(pickle.dumps(record)) == record


def test_factors_eigenvalues_above_the_threshold_are_counted_as_the_documents_do():
    metrics = measure(dense([([1e-9, 1e-7, 1.0], [0.0, 2.0])]))
    record = metrics["w0"]
    assert (record.num_above_a, record.num_above_g, record.num_above) == (2, 1, 2)
    assert metrics.model.num_above_a is None


def test_over_layers_each_slice_counts_as_one(bases):
    metrics = measure(bases)
    rows = [row for name in bases for row in eigenvalues(bases, name)]
    ranks = [expected(row)["participation_ratio"] for row in rows]
    over = metrics.over_layers
    assert over.mean_participation_ratio == pytest.approx(np.mean(ranks))
    assert over.largest_condition == pytest.approx(max(row.max() / row.min() for row in rows))
    singular = measure(dense([([1.0, 0.0], [1.0]), ([1.0], [1.0])])).over_layers
    assert singular.largest_condition is None and singular.largest_condition_clipped == 1e3


@pytest.mark.slow
@pytest.mark.parametrize("bias", ["joint", "separate"])
def test_measured_eigenvalues_count_instead_of_products(bias):
    bases = eigendecompose(random_factors(LAYERS, jax.random.key(0), bias=bias), vectors=False)
    rng, sums, bias_sums = np.random.default_rng(0), {}, {}
    for each in LAYERS:
        basis = bases.basis(each)
        shape = each.weight.atoms
        if not each.is_diagonal:
            shape = (*basis.a_values.shape, basis.g_values.shape[-1])
            if bias == "separate" and each.bias is not None:
                bias_sums[each.name] = jnp.asarray(rng.uniform(0, 1, basis.g_values.shape))
        sums[each.name] = jnp.asarray(rng.uniform(0, 1, shape))
    corrections = Corrections(sums, bias_sums, jnp.asarray(4.0))
    metrics = measure(dataclasses.replace(bases, corrections=corrections))
    lists = {
        name: np.concatenate([np.ravel(x[name]) for x in (sums, bias_sums) if name in x]) / 4
        for name in bases
    }
    for name, values in lists.items():
        assert_metrics(metrics[name], expected(values))
    assert_metrics(metrics.model, expected(np.concatenate([*lists.values()])))
    assert metrics["q"].num_above_a == measure(bases)["q"].num_above_a


def test_a_parameter_of_two_blocks_counts_once_and_the_other_block_is_named():
    tied = (
        layer("table@embedding", (6, 3), kind="embedding", a_dense=False),
        layer("table", (6, 3)),
    )
    tied = (dataclasses.replace(tied[0], weight=tied[1].weight), tied[1])
    bases = eigendecompose(random_factors(tied, jax.random.key(0)), vectors=False)
    metrics = measure(bases)
    assert metrics.not_counted == ("table@embedding",)
    assert "table@embedding" in str(metrics).splitlines()[-1]
    assert_metrics(metrics.model, expected(eigenvalues(bases, "table")))


def test_a_bias_beside_anothers_weight_has_the_block_g():
    one, other = layer("w", (3, 2), bias="b"), layer("w", (3, 2), name="w@2", bias="c")
    bases = eigendecompose(random_factors((one, other), jax.random.key(0)), vectors=False)
    g = bases["w@2"].g_raw_values
    whole = np.concatenate([eigenvalues(bases, "w").ravel(), g])
    assert_metrics(measure(bases).model, expected(whole))


@pytest.mark.parametrize("n", [1, 18])
def test_the_local_effective_dimension_needs_enough_examples(n):
    assert measure(dense([([1.0], [2.0])]), num_examples=n).model.local_effective_dimension is None
    assert measure(dense([([1.0], [2.0])]), num_examples=19).model.local_effective_dimension > 0


def test_zero_factors_give_records_that_survive_json():
    plain = json.loads(json.dumps(measure(dense([([0.0], [0.0])])).to_dict(), allow_nan=False))
    model = plain["model"]
    assert model["condition"] is None and model["log_determinant"] is None
    assert model["entropy_rank"] == model["trace"] == 0
    assert plain["num_examples"] == N and plain["damping"] == DELTA


def test_the_table_fits_120_columns_and_names_everything(bases):
    name = "decoder/" * 20 + "kernel"
    factors = random_factors((layer(name, (3, 2)),), jax.random.key(0))
    for metrics in (measure(bases), measure(eigendecompose(factors))):
        lines = str(metrics).splitlines()
        assert max(map(len, lines)) <= 120
        assert any(line.startswith("whole model") for line in lines)
    assert "decoder/kernel" in str(metrics)


def test_intervals_are_those_of_student(bases):
    metrics = [measure(dense([([x, 1.0], [1.0])])) for x in (1.0, 2.0, 4.0)]
    interval = capacity_interval(metrics, confidence=0.9)
    traces = np.array([2.0, 3.0, 5.0])
    half = 2.9199855803537 * traces.std(ddof=1) / np.sqrt(3)  # t quantile 0.95, 2 degrees
    for found in (interval.model["trace"], interval.layers["w0"]["trace"]):
        np.testing.assert_allclose(found, [traces.mean(), *(traces.mean() + [-half, half])])
    singular = [measure(dense([([x, 1.0], [1.0])])) for x in (0.0, 2.0)]
    assert capacity_interval(singular).model["condition"] is None
    json.dumps(capacity_interval(singular).to_dict(), allow_nan=False)
    assert "condition" in str(capacity_interval(singular))


def test_a_comparison_has_differences_and_ratios_and_names_what_is_in_one_only():
    one = measure(dense([([1.0, 0.0], [1.0])]))
    other = measure(dense([([3.0, 1.0], [1.0]), ([1.0], [1.0])]))
    change = compare_capacity(one, other)
    assert change.layers["w0"]["trace"] == (1.0, 4.0, 3.0, 4.0)
    assert change.layers["w0"]["condition"] == (None, 3.0, None, None)
    assert change.model["trace"] == (1.0, 5.0, 4.0, 5.0)
    assert change.only_after == ("w1",) and change.only_before == ()
    assert compare_capacity(other, one).only_before == ("w1",)
    assert "only after: w1" in str(change)
    json.dumps(change.to_dict(), allow_nan=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_examples": 0.5}, "num_examples"),
        ({"num_examples": math.nan}, "num_examples"),
        ({"damping": -1.0}, "damping"),
        ({"threshold": -1e-8}, "threshold"),
        ({"powers": (-1.0,)}, "rounding"),
        ({"quantiles": (1.5,)}, "quantiles"),
    ],
)
def test_arguments_out_of_range_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        measure(dense([([1.0], [1.0])]), **arguments)


def test_what_cannot_be_measured_is_refused_with_what_to_do(bases):
    with pytest.raises(TypeError, match="jk.eigendecompose"):
        inspect.unwrap(capacity_metrics)({"w": 1.0}, num_examples=1)  # without the test's types
    with pytest.raises(ValueError, match="outside"):
        jax.jit(lambda b: measure(b).model.trace)(bases)
    with pytest.raises(NonFiniteFactorError, match="'w0'"):
        measure(dense([([math.nan], [1.0])]))
    with pytest.raises(UnknownLayerError, match="'stacked'"):
        measure(bases)["stakced"]
    with pytest.raises(ValueError, match="num_examples=300 and num_examples=5"):
        compare_capacity(measure(bases), measure(bases, num_examples=5))
    with pytest.raises(ValueError, match="different models"):
        capacity_interval([measure(bases), measure(dense([([1.0], [1.0])]))])
    with pytest.raises(ValueError, match="two batches"):
        capacity_interval([measure(bases)])
    with pytest.raises(ValueError, match="confidence"):
        capacity_interval([measure(bases)] * 2, confidence=1.0)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("placement", ["auto", "device", "host"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("stack", [0, 1])
def test_the_rank_of_a_factor_of_few_rows_is_their_number(placement, dtype, stack):
    layers = (layer("w", (*[2] * stack, 64, 48), stack=stack),)
    factors = random_factors(layers, jax.random.key(3), rows=10, dtype=dtype)
    metrics = measure(eigendecompose(factors, placement=placement, vectors=False), powers=())
    assert [record.num_positive for record in metrics["w"].parts] == [100] * (1 + stack)
    undamped = measure(eigendecompose(factors, placement=placement, vectors=False), damping=0.0)
    assert undamped["w"].effective_dimension == 100 * (1 + stack)
    exact = lambda x: np.log(np.sort(np.linalg.eigvalsh(x.astype(np.float64)))[..., -10:]).sum()
    wanted = 10 * (exact(factors["w"].a) + exact(factors["w"].g))
    np.testing.assert_allclose(metrics["w"].log_pseudo_determinant, wanted, rtol=1e-4)
    assert metrics["w"].log_determinant is None


def test_small_values_of_a_diagonal_side_are_no_rounding_errors():
    tiny = jnp.asarray([1e-30, 1e-9, 1.0], jnp.float32)
    table = layer("t", (3, 2), kind="embedding", a_dense=False)
    spectra = {"t": Spectrum(tiny, None)}, {"t": Spectrum(jnp.ones(2, jnp.float32), None)}
    bases = Eigenbases(spectra[0], {}, spectra[1], {}, (table,), "joint", 1e6, 0.0)
    assert measure(bases)["t"].num_positive == 6


def test_products_below_the_smallest_float32_count_like_others():
    factors = random_factors((layer("w", (5, 4)),), jax.random.key(3), dtype=jnp.float32)
    small = jax.tree.map(lambda x: x * 1e-22, factors)  # the counts as well
    small = dataclasses.replace(small, a_counts=factors.a_counts, terms=factors.terms)
    of, of_small = (measure(eigendecompose(x, vectors=False), powers=()) for x in (factors, small))
    for name in ("num_positive", "entropy_rank", "participation_ratio", "condition"):
        np.testing.assert_allclose(
            getattr(of_small["w"], name), getattr(of["w"], name), rtol=1e-4, err_msg=name
        )
    np.testing.assert_allclose(of_small["w"].trace, of["w"].trace * 1e-44, rtol=1e-5)
