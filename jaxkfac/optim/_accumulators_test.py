"""What is kept between micro-steps: how exact it is, how many bytes, and in which memory."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxkfac.blocks._random_factors_test import layer, random_factors
from jaxkfac.factors._explicit_net_test import net_batch, net_like, net_params, net_statistics
from jaxkfac.optim import has_updated, kfac, multi_steps
from jaxkfac.optim._accumulators import check_memory_kind

HOST = {"accumulator_memory_kind": "pinned_host"}
HALF = {"accumulator_dtype": jnp.bfloat16}
LENGTHS = (3, 1, 0, 2)  # loss terms of the micro-batches


def group(seed, lengths=LENGTHS, rows=3, dtype=None):
    batches = [net_batch(jax.random.key(seed + i), rows, dtype) for i in range(len(lengths))]
    return [(x, y, jnp.arange(rows) < n) for (x, y, _), n in zip(batches, lengths, strict=True)]


def collecting(like):
    """The pooled gradient is the update, the pooled factors are the state."""
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    return optax.GradientTransformationExtraArgs(
        lambda params: zeros, lambda grads, state, params=None, *, factors: (grads, factors)
    )


def pooled(params, batches, **options):
    """``(mean gradient, factors)`` of one group, and the state after it."""
    like = net_like(params, batches[0])
    tx = multi_steps(collecting(like), len(batches), like=like, **options)
    step = jax.jit(lambda g, s, f: tx.update(g, s, factors=f))
    state, updates = tx.init(params), None
    for batch in batches:
        grads, factors = net_statistics(params, batch)
        updates, state = step(grads, state, factors)
    return (updates, state.inner), state


def assert_equal(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for x, y in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert x.dtype == y.dtype and np.array_equal(x, y, equal_nan=True)


def pooled_gradients(number, spread, **options):
    """The relative error of the mean of ``number`` unequal micro-batches, from float64."""
    mean, noise, counts = jax.random.split(jax.random.key(number), 3)
    grads = jax.random.normal(mean, (2000,)) + spread * jax.random.normal(noise, (number, 2000))
    terms = jax.random.randint(counts, (number,), 100, 1000).astype(jnp.float32)
    tx = multi_steps(optax.identity(), number, **options)

    def step(state, row):
        updates, state = tx.update({"w": row[0]}, state, terms=row[1])
        return state, updates["w"]

    updates = jax.jit(lambda: jax.lax.scan(step, tx.init({"w": grads[0]}), (grads, terms))[1])()
    weights = np.float64(terms)
    exact = weights @ np.float64(grads) / weights.sum()
    return float(np.linalg.norm(updates[-1] - exact) / np.linalg.norm(exact))


@pytest.mark.exhaustive
def test_bfloat16_over_sixteen_micro_batches_is_four_tenths_of_a_per_cent_off():
    for spread in (0.0, 1.0, 4.0):  # gradients that agree, and that almost cancel
        assert pooled_gradients(16, spread) < 1e-6
        assert pooled_gradients(16, spread, **HALF) < 0.005
    assert pooled_gradients(16, 1.0, **HALF) == pytest.approx(0.0039, rel=0.1)


def test_a_mean_that_is_kept_in_bfloat16_does_not_stop_growing():
    assert pooled_gradients(1024, 0.0, **HALF) < 0.002  # one rounding; a sum is 41 % off
    assert pooled_gradients(1024, 1.0, **HALF) < 0.05  # and 24 %


@pytest.mark.exhaustive
def test_one_micro_batch_a_group_loses_nothing_in_bfloat16():
    params, batches = net_params(jax.random.key(0)), group(0, (2,))
    assert_equal(pooled(params, batches, **HALF)[0], pooled(params, batches)[0])


def test_factors_keep_every_digit_in_bfloat16_and_gradients_eight_bits():
    params, batches = net_params(jax.random.key(0)), group(0)
    (wide, factors), _ = pooled(params, batches)
    (narrow, kept), _ = pooled(params, batches, **HALF)
    for name in ("a_sums", "a_counts", "g_sums", "terms"):
        for x, y in zip(
            jax.tree.leaves(getattr(kept, name)),
            jax.tree.leaves(getattr(factors, name)),
            strict=True,
        ):
            assert jnp.allclose(x, y, rtol=3e-7, atol=1e-7)  # the order of the two additions
    errors = jax.tree.map(lambda x, y: jnp.abs(x - y).max() / jnp.abs(y).max(), narrow, wide)
    assert 1e-4 < max(jax.tree.leaves(errors)) < 0.01
    scale = kept.diagonals["scale"], factors.diagonals["scale"]
    assert jnp.allclose(*scale, rtol=0.01) and not jnp.allclose(*scale, rtol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("x64")
def test_float32_under_x64_keeps_factors_in_double_and_halves_the_bytes():
    params, batches = net_params(jax.random.key(0)), group(0)
    (wide, factors), full = pooled(params, batches)
    (narrow, kept), half = pooled(params, batches, accumulator_dtype=jnp.float32)
    for x, y in zip(jax.tree.leaves(kept.g_sums), jax.tree.leaves(factors.g_sums), strict=True):
        assert x.dtype == jnp.float64 and jnp.allclose(x, y, rtol=1e-14, atol=1e-14)
    for x, y in zip(jax.tree.leaves(narrow), jax.tree.leaves(wide), strict=True):
        assert jnp.allclose(x, y, rtol=1e-5, atol=1e-6) and not jnp.allclose(x, y, rtol=1e-12)
    counts = half.accumulation.acc_grads["factors"].a_counts
    assert {x.dtype for x in counts.values()} == {jnp.dtype(jnp.float64)}
    bytes_of = lambda s: sum(x.nbytes for x in jax.tree.leaves(s.accumulation.acc_grads["grads"]))
    assert 2 * bytes_of(half) == bytes_of(full)


@pytest.mark.slow
def test_bfloat16_halves_the_bytes_of_gradients_and_of_large_factors():
    like = random_factors(
        (layer("w", (200, 100)), layer("x", (2, 65, 50), stack=1)), jax.random.key(0)
    )
    params = {"w": jnp.zeros((200, 100))}
    held = [
        multi_steps(optax.identity(), 2, like=like, **options).init(params).accumulation.acc_grads
        for options in ({}, HALF)
    ]
    sizes = [{k: sum(x.nbytes for x in jax.tree.leaves(v)) for k, v in x.items()} for x in held]
    assert sizes[0]["grads"] == 2 * sizes[1]["grads"] and sizes[0]["terms"] == sizes[1]["terms"]
    assert sizes[1]["factors"] == pytest.approx(sizes[0]["factors"] / 2, rel=0.02)


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [{}, HALF], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["of float32", "of bfloat16"])
def test_accumulators_on_the_host_equal_those_on_the_device_bit_for_bit(options, dtype):
    params, batches = net_params(jax.random.key(0)), group(0)
    like = net_like(params, batches[0])
    runs = []
    for where in ({}, HOST):
        tx = multi_steps(kfac(0.1, like=like, damping=0.1), 2, **options, **where)

        @jax.jit
        def run(params, stacked, tx=tx):
            def step(carry, batch):
                params, state = carry
                grads, factors = net_statistics(params, batch)
                grads = jax.tree.map(lambda g: g.astype(dtype), grads)
                updates, state = tx.update(grads, state, params, factors=factors)
                updates = jax.tree.map(lambda u: u.astype(jnp.float32), updates)
                return (optax.apply_updates(params, updates), state), has_updated(state)

            return jax.lax.scan(step, (params, tx.init(params)), stacked)

        (found, state), ended = run(params, jax.tree.map(lambda *x: jnp.stack(x), *batches))
        assert ended.tolist() == [False, True] * 2 and int(state.inner.step) == 2
        runs.append((found, state))
    assert_equal(*runs)


def test_all_but_counts_stays_on_the_host_between_micro_steps():
    params, batches = net_params(jax.random.key(0)), group(0)
    like = net_like(params, batches[0])
    tx = multi_steps(kfac(0.1, like=like), 2, **HOST)
    grads, factors = net_statistics(params, batches[0])
    first = tx.init(params)
    for step in (tx.update, jax.jit(tx.update)):
        _, state = step(grads, first, params, factors=factors)
        for each in (first, state):
            kept = each.accumulation.acc_grads
            sums = [kept["grads"], kept["factors"].a_sums, kept["factors"].g_sums]
            sums.append(kept["factors"].diagonals)
            others = [kept["terms"], kept["factors"].a_counts, kept["factors"].terms, each.inner]
            assert spaces(sums) == {jax.memory.Space.Host}
            assert spaces(others) == {jax.memory.Space.Device}


def spaces(tree):
    return {jax.typeof(x).memory_space for x in jax.tree.leaves(tree)}


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [HALF, HOST, {**HALF, **HOST}], ids=["bf16", "host", "both"])
def test_a_donated_state_is_consumed_and_keeps_its_types(options):
    params, batches = net_params(jax.random.key(0)), group(0)
    like = net_like(params, batches[0])
    tx = multi_steps(kfac(0.1, like=like), 2, **options)
    grads, factors = net_statistics(params, batches[0])
    step = jax.jit(lambda s, g, f: tx.update(g, s, params, factors=f)[1], donate_argnums=0)
    before = tx.init(params)
    after = step(before, grads, factors)
    kept = jax.tree.leaves(before.accumulation.acc_grads)
    assert all(x.is_deleted() for x in kept)
    types = lambda tree: [jax.typeof(x) for x in jax.tree.leaves(tree)]
    assert types(after) == types(tx.init(params))


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [HALF, HOST, {**HALF, **HOST}], ids=["bf16", "host", "both"])
def test_a_non_finite_micro_batch_leaves_the_accumulators_as_they_were(options):
    params, batches = net_params(jax.random.key(0)), group(0, (3, 2))
    like = net_like(params, batches[0])
    tx = multi_steps(kfac(0.1, like=like), 3, **options)
    step = jax.jit(lambda g, s, f: tx.update(g, s, params, factors=f))
    grads, factors = net_statistics(params, batches[0])
    _, state = step(grads, tx.init(params), factors)
    broken = jax.tree.map(lambda g: g.at[0].set(jnp.inf), grads)
    _, after = step(broken, state, factors)
    assert_equal(after.accumulation.acc_grads, state.accumulation.acc_grads)
    assert int(after.skipped) == 1 and int(after.accumulation.mini_step) == 2


@pytest.mark.exhaustive
def test_rows_before_the_first_loss_term_are_kept_in_bfloat16():
    params, batches = net_params(jax.random.key(0)), group(0, (0, 0, 2))
    (_, wide), _ = pooled(params, batches)
    (_, kept), _ = pooled(params, batches, **HALF)
    name = "left/kernel"
    assert float(kept.a_counts[name]) == float(wide.a_counts[name]) == 9
    assert jnp.allclose(kept.a_sums[name], wide.a_sums[name], rtol=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [HALF, HOST], ids=["bf16", "host"])
def test_a_state_goes_through_plain_arrays_and_back(options):
    params, batches = net_params(jax.random.key(0)), group(0, (3, 2))
    like = net_like(params, batches[0])
    tx = multi_steps(kfac(0.1, like=like), 2, **options)
    step = jax.jit(lambda g, s, f: tx.update(g, s, params, factors=f))
    (first, second) = (net_statistics(params, batch) for batch in batches)
    _, state = step(first[0], tx.init(params), first[1])
    leaves, structure = jax.tree.flatten(state)
    restored = jax.tree.unflatten(structure, [np.array(x) for x in leaves])
    assert_equal(step(second[0], restored, second[1]), step(second[0], state, second[1]))


def test_the_state_is_as_without_options_where_none_are_given():
    params = net_params(jax.random.key(0))
    like = net_like(params, group(0)[0])
    kept = multi_steps(kfac(0.1, like=like), 2).init(params).accumulation.acc_grads
    shapes = lambda tree: [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]
    assert shapes(kept["grads"]) == shapes(params) and shapes(kept["factors"]) == shapes(like)
    assert spaces(kept) == {jax.memory.Space.Device}


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float16, jnp.float8_e4m3fn, bool, jnp.complex64])
def test_dtypes_that_cannot_hold_a_gradient_are_refused(dtype):
    message = "accumulator_dtype=.*expected one of 'bfloat16', 'float32', 'float64'"
    with pytest.raises(ValueError, match=message):
        multi_steps(optax.identity(), 2, accumulator_dtype=dtype)


def test_double_accumulators_need_x64():
    with pytest.raises(ValueError, match="accumulator_dtype='float64' needs .*x64"):
        multi_steps(optax.identity(), 2, accumulator_dtype=jnp.float64)
    with jax.enable_x64(True):
        tx = multi_steps(optax.identity(), 2, accumulator_dtype=jnp.float64)
        kept = tx.init({"w": jnp.zeros(2, jnp.float32)}).accumulation.acc_grads
    assert kept["grads"]["w"].dtype == kept["terms"].dtype == jnp.float64


def test_a_memory_that_is_not_there_is_refused_by_name(monkeypatch):
    with pytest.raises(ValueError, match="accumulator_memory_kind='host': expected one of"):
        check_memory_kind("host")
    memories = [types.SimpleNamespace(kind=kind) for kind in ("device", "unpinned_host")]
    device = types.SimpleNamespace(addressable_memories=lambda: memories)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    tx = multi_steps(optax.identity(), 2, **HOST)
    with pytest.raises(ValueError, match="no such memory, but 'device', 'unpinned_host'; keep"):
        jax.eval_shape(tx.init, {"w": jnp.zeros(2)})
