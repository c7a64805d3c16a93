import dataclasses
import errno
import math
import os
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxkfac.blocks import Place, layout_of, update_average
from jaxkfac.blocks._random_factors_test import layer, random_factors
from jaxkfac.curvature.host import _store
from jaxkfac.curvature.host._average import Averages
from jaxkfac.curvature.host._store import Store

LAYERS = (
    layer("q", (3, 4), bias="q_bias"),
    layer("k", (3, 4), input="q"),
    layer("stacked", (3, 4, 5), bias="stacked_bias", stack=1),
    layer("table", (6, 3), kind="embedding", a_dense=False),
    layer("scale", (2, 4), kind="scale", stack=1, inputs=(), g_dense=False),
    layer("gain", (), kind="diagonal", inputs=(), a_dense=False, g_dense=False),
)


def on_host(factors):
    return jax.tree.map(np.asarray, factors)


def steps(count, dtype=None):
    return [
        on_host(random_factors(LAYERS[:-1], jax.random.key(i), dtype=dtype)) for i in range(count)
    ]


def new(decay=0.9, layers=LAYERS[:-1], **kwargs):
    return Averages(
        layout_of(layers, "joint"), decay, kwargs.pop("storage", "float32"), Store(None, None)
    )


def add(averages, factors, age, *, places=None, rows=slice(None)):
    for place, entry in averages.layout.entries.items():
        if places is not None and place not in places:
            continue
        table = {"a": factors.a_sums, "g": factors.g_sums, "diagonals": factors.diagonals}
        value = table[place.table][place.key]
        count = factors.a_counts[place.key] if place.table == "a" else factors.terms
        if entry.stack:
            value, count = value[rows], count[rows] if count.ndim else count
        averages.add(entry, value, count, rows.start or 0, age)


def assert_same(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert np.asarray(x).dtype == np.asarray(y).dtype and np.array_equal(x, y)


@pytest.mark.parametrize("double", [False, True])
def test_it_is_update_average_bit_by_bit(double):
    with jax.enable_x64(double):
        averages, expected = new(), None
        for age, factors in enumerate(steps(4), 1):
            add(averages, factors, age)
            expected = factors if expected is None else update_average(expected, factors, 0.9)
        assert expected.terms.dtype == (np.float64 if double else np.float32)
        assert_same(averages.factors(4), expected)


@pytest.mark.parametrize("stacked_rows", [slice(None), slice(1, 3)])
def test_counts_of_zero_are_nothing_new(stacked_rows):
    """Alone in a step, they leave the average; before and behind others of it, nothing changes."""
    zeros, (first, second) = (lambda x: jax.tree.map(np.zeros_like, x)), steps(2)
    averages = new()
    add(averages, first, 1)
    add(averages, zeros(first), 2)
    assert_same(averages.factors(2), first)
    add(averages, zeros(first), 3, rows=stacked_rows)
    add(averages, second, 3)
    add(averages, zeros(first), 3)
    add(averages, zeros(first), 4)
    assert_same(averages.factors(4), update_average(first, second, 0.9))


def test_parts_of_a_step_are_the_step():
    whole, parts = new(), new()
    for age, factors in enumerate(steps(3), 1):
        add(whole, factors, age)
        stacked = [p for p, e in parts.layout.entries.items() if e.stack]
        flat = [p for p, e in parts.layout.entries.items() if not e.stack]
        add(parts, factors, age, places=stacked, rows=slice(1, 3))
        add(parts, factors, age, places=flat)
        add(parts, factors, age, places=stacked, rows=slice(0, 1))
    assert_same(parts.factors(3), whole.factors(3))


def test_micro_batches_are_added_by_count():
    first, second, third = steps(3)
    averages = new()
    for age, factors in ((1, first), (2, second), (2, third)):
        add(averages, factors, age)
    expected = update_average(first, second + third, 0.9)
    for x, y in zip(jax.tree.leaves(averages.factors(2)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-5)


LINEAR = (layer("w", (3, 4)),)


def in_one_step(averages, factors, number):
    for _ in range(number):
        add(averages, factors, 1)
    return averages


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "number", [10_000, pytest.param(200_000, marks=[pytest.mark.exhaustive, pytest.mark.slow])]
)
@pytest.mark.parametrize("decay", [0.9, 1 - 1e-9])
def test_sums_of_very_many_pushes_keep_their_digits(number, decay):
    (factors,) = (on_host(random_factors(LINEAR, jax.random.key(0))),)
    averages = new(decay, LINEAR)
    for age in range(1, number + 1):
        add(averages, factors, 1 if decay == 0.9 else age)
    found = averages.factors(1 if decay == 0.9 else number)
    weight = number if decay == 0.9 else -np.expm1(number * np.log(decay)) / (1 - decay)
    np.testing.assert_allclose(found.a_sums["w"], weight * factors.a_sums["w"], rtol=1e-5)
    np.testing.assert_allclose(found.a_counts["w"], weight * factors.a_counts["w"], rtol=1e-5)
    assert found.a_sums["w"].dtype == found.a_counts["w"].dtype == np.float32


def test_few_pushes_keep_their_bytes_and_many_take_twice():
    (factors,) = (on_host(random_factors(LINEAR, jax.random.key(0))),)
    averages = in_one_step(new(layers=LINEAR), factors, 256)
    single = averages._store.in_memory
    in_one_step(averages, factors, 1)
    assert averages._store.in_memory == 2 * single
    entry = averages.layout.entries[Place("a", "w")]
    assert averages.snapshot(entry, 1).sums.dtype == np.float32


def test_without_room_sums_stay_in_single_precision_and_say_so_once(recwarn):
    (factors,) = (on_host(random_factors(LINEAR, jax.random.key(0))),)
    averages = in_one_step(new(layers=LINEAR), factors, 256)
    averages._store.budget = averages._store.in_memory
    in_one_step(averages, factors, 3)
    messages = [str(warning.message) for warning in recwarn]
    assert len(messages) == 2 and all("stays in float32" in message for message in messages)
    assert {running.sums.dtype for running in averages.running.values()} == {np.dtype(np.float32)}


def test_a_factor_that_skips_steps_decays_with_the_others():
    first, second = steps(2)
    averages = new()
    add(averages, first, 1)
    g = Place("g", "q")
    add(averages, second, 3, places=[g])
    view = averages.view(averages.layout.entries[g], 3)
    decayed = np.float32(0.9) * (np.float32(0.9) * first.g_sums["q"])
    assert np.array_equal(view.total(()), decayed + second.g_sums["q"])


def test_what_is_not_finite_is_left_out_with_its_count():
    first, second = steps(2)
    averages, expected = new(), new()
    for each in (averages, expected):
        add(each, first, 1)
    bad = {**second.g_sums, "k": second.g_sums["k"].copy()}
    bad["k"][0, 3] = np.nan  # the triangle that is not kept
    places = [p for p in averages.layout.entries if p != ("g", "k")]
    add(expected, second, 2, places=places)
    second.g_sums.update(bad)
    add(averages, second, 2)
    assert averages.left_out == {"G of layer 'k'": 1}
    entry = averages.layout.entries[Place("g", "k")]
    a, b = averages.snapshot(entry, 2), expected.snapshot(entry, 2)
    assert a.count == b.count and np.array_equal(a.mean(()), b.mean(()))
    assert a.num_left_out == 0  # there was the first step
    add(averages, second, 3)
    assert averages.snapshot(entry, 3).num_left_out == 1


@pytest.mark.parametrize(
    ("storage", "first", "second"),
    [
        ("float32", np.float32(3e38), np.float32(3e38)),
        ("float32", np.float32(1), np.float64(1e300)),  # too much for the dtype of the average
        ("bfloat16", np.float32(1), np.float32(3.4e38)),  # finite, and rounded to infinity
    ],
)
@pytest.mark.parametrize("key", ["k", "stacked"])
def test_a_sum_that_overflows_begins_anew(storage, first, second, key):
    averages = new(storage=storage)
    entry = averages.layout.entries[Place("g", key)]
    ones, count = np.ones(entry.shape), np.ones((), np.float32)
    averages.add(entry, (first * ones).astype(first.dtype), count, 0, 1)
    averages.add(entry, (second * ones).astype(second.dtype), count, 0, 1)
    assert averages.left_out == {entry.name: 1}
    assert averages.snapshot(entry, 1).num_left_out == 1  # so the basis there is is kept
    averages.add(entry, ones.astype(np.float32), count, 0, 2)
    held = averages.snapshot(entry, 2)
    index = (0,) * len(entry.stack)
    assert held.num_left_out == 0 and np.array_equal(held.mean(index), ones[index])


def test_sums_over_fewer_terms_keep_their_mean():
    first, second = steps(2)
    averages, expected = new(), new()
    add(expected, first, 1)
    add(expected, second, 2)
    add(averages, first, 1)
    places = [p for p in averages.layout.entries if p not in (("g", "k"), ("g", "stacked"))]
    add(averages, second, 2, places=places)
    stacked = averages.layout.entries[Place("g", "stacked")]
    averages.add(stacked, second.g_sums["stacked"][:2], second.terms, 0, 2)
    whole, some = expected.factors(2), averages.factors(2)
    assert some.terms == whole.terms
    np.testing.assert_allclose(some["k"].g, first["k"].g, rtol=1e-6)
    np.testing.assert_allclose(some["stacked"].g[2:], first["stacked"].g[2:], rtol=1e-6)
    assert np.array_equal(some["stacked"].g[:2], whole["stacked"].g[:2])
    assert np.array_equal(some["q"].g, whole["q"].g)
    assert np.array_equal(some["scale"].diagonal, whole["scale"].diagonal)


def test_symmetric_sums_take_half_the_bytes_and_bfloat16_a_quarter():
    square = (layer("w", (64, 64)),)
    factors = on_host(random_factors(square, jax.random.key(0)))
    whole = sum(x.nbytes for x in (factors.a_sums["w"], factors.g_sums["w"]))
    for storage, share in (("float32", 2), ("bfloat16", 4)):
        averages = new(layers=square, storage=storage)
        add(averages, factors, 1)
        held = sum(r.sums.nbytes for r in averages.running.values())
        assert held == whole / share * 65 / 64


def test_bfloat16_stays_within_its_stated_error():
    decay, exact, rounded = 0.9, new(), new(storage="bfloat16")
    largest = {}
    for age, factors in enumerate(steps(30), 1):
        add(exact, factors, age)
        add(rounded, factors, age)
        for place, entry in exact.layout.entries.items():
            total = np.abs(exact.view(entry, age).sums)
            largest[place] = np.maximum(largest.get(place, 0), total)
    worst = 0.0
    for place, entry in exact.layout.entries.items():
        error = np.abs(rounded.view(entry, 30).sums.astype(np.float32) - exact.view(entry, 30).sums)
        bound = 2**-8 * largest[place] / (1 - decay)
        assert (error <= bound).all()
        worst = max(worst, float((error / np.maximum(bound, 1e-30)).max()))
    assert worst > 0.01  # it is rounded at all
    counts = [running.count.dtype for running in rounded.running.values()]
    assert set(counts) == {np.dtype(np.float32)}


def test_a_scalar_parameter_has_a_diagonal_of_one():
    averages = new(layers=LAYERS[-1:])
    entry = averages.layout.entries[Place("diagonals", "gain")]
    for age, value in enumerate((2.0, 4.0), 1):
        averages.add(entry, np.array(value, np.float32), np.array(1, np.float32), 0, age)
    mean = (0.9 * 2 + 4) / 1.9
    assert math.isclose(float(averages.snapshot(entry, 2).mean(())), mean, rel_tol=1e-6)


def test_averages_beyond_the_budget_are_mapped_files(tmp_path: Path):
    square = (layer("w", (20, 30)),)
    store = Store(900, tmp_path)  # A takes 840 bytes
    averages = Averages(layout_of(square, "joint"), 0.9, "float32", store)
    in_memory = new(layers=square)
    for age in (1, 2):
        factors = on_host(random_factors(square, jax.random.key(age)))
        add(averages, factors, age)
        add(in_memory, factors, age)
    assert store.in_memory == 840 and store.on_disk == 4 * 30 * 31 // 2
    assert_same(averages.factors(2), in_memory.factors(2))
    assert not list(tmp_path.iterdir())  # nothing to clean up, however the process ends
    del averages
    assert store.in_memory == store.on_disk == 0


def test_thousands_of_arrays_share_some_files(tmp_path: Path, monkeypatch):
    mapped, files = _store._mapped, []

    def counted(folder, nbytes, what):
        files.append(nbytes)
        return mapped(folder, nbytes, what)

    monkeypatch.setattr(_store, "_mapped", counted)
    store, arrays = Store(0, tmp_path), []
    for i in range(1700):
        arrays.append(store.zeros((250,), np.dtype(np.float32), "x"))
        arrays[-1][...] = i
    empty = store.empty((0, 3), np.dtype(np.float32), "nothing")
    assert len(files) < 250 and sum(files) < 1.2 * 1700 * 250 * 4
    assert all((array == i).all() for i, array in enumerate(arrays)) and empty.shape == (0, 3)
    assert store.on_disk == 1700 * 250 * 4
    arrays.clear()
    assert store.on_disk == 0


def test_an_array_fits_on_a_disk_that_has_no_room_for_a_shared_file(tmp_path: Path, monkeypatch):
    mapped = _store._mapped

    def nearly_full(folder, nbytes, what):
        if nbytes > 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        return mapped(folder, nbytes, what)

    store = Store(0, tmp_path)
    large = store.empty((1 << 16,), np.dtype(np.uint8), "large")
    monkeypatch.setattr(_store, "_mapped", nearly_full)
    small = store.zeros((1,), np.dtype(np.float32), "small")
    assert store.on_disk == large.nbytes + small.nbytes


def test_too_many_open_files_are_no_full_disk(tmp_path: Path, monkeypatch):
    def too_many(**_):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(_store.tempfile, "TemporaryFile", too_many)
    with pytest.raises(OSError, match="the average of x needs a file .* raise `ulimit -n`"):
        Store(0, tmp_path).empty((100,), np.dtype(np.float32), "the average of x")


def test_a_full_disk_says_what_needs_how_much(tmp_path: Path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"the average of x needs 400 bytes on disk and .* free"):
        Store(0, tmp_path).empty((100,), np.dtype(np.float32), "the average of x")
    with pytest.raises(MemoryError, match="x needs 400 bytes of host memory.*disk="):
        Store(0, None).empty((100,), np.dtype(np.float32), "x")


def test_a_slice_without_rows_has_the_mean_zero():
    (factors,), averages = steps(1), new()
    sums, counts = factors.a_sums["stacked"].copy(), factors.a_counts["stacked"].copy()
    sums[1], counts[1] = 0, 0
    factors = dataclasses.replace(
        factors,
        a_sums=factors.a_sums | {"stacked": sums},
        a_counts=factors.a_counts | {"stacked": counts},
    )
    add(averages, factors, 1)
    snapshot = averages.view(averages.layout.entries[Place("a", "stacked")], 1)
    np.testing.assert_array_equal(snapshot.mean((1,)), np.zeros_like(sums[1]))
    np.testing.assert_allclose(snapshot.mean((0,)), sums[0] / counts[0], rtol=1e-6)
