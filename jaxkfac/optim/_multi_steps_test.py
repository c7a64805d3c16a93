import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxkfac.blocks import zeros_like
from jaxkfac.blocks._random_factors_test import layer, random_factors
from jaxkfac.curvature import eigendecompose
from jaxkfac.factors import Categorical, Objective, value_grad_and_factors
from jaxkfac.factors._explicit_net_test import net_batch, net_like, net_params, net_statistics
from jaxkfac.optim import has_updated, kfac, multi_steps, scale_by_bases

pytestmark = pytest.mark.usefixtures("x64")

K, N = 4, 3


@pytest.fixture
def params():
    return net_params(jax.random.key(0))


def like_for(params, dtype=None):
    return net_like(params, net_batch(jax.random.key(0), N, dtype))


def group(seed, lengths=(3, 1, 0, 2)):
    """K micro-batches of N rows, of which ``lengths`` have a loss; and the batch of them all."""
    x, y, _ = net_batch(jax.random.key(seed), K * N)
    mask = (jnp.arange(N)[None] < jnp.array(lengths)[:, None]).reshape(-1)
    big = (x, y, mask)
    return [tuple(v[i * N : (i + 1) * N] for v in big) for i in range(K)], big


def assert_close(a, b, tol=1e-12):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert jnp.allclose(x, y, rtol=tol, atol=tol), (x, y)


def jitted(tx):
    return jax.jit(lambda g, s, p, f: tx.update(g, s, p, factors=f))


def test_k_micro_batches_equal_one_large_batch_after_five_steps(params):
    like = like_for(params)
    make = lambda: kfac(0.1, like=like, refresh_every=2, norm_constraint=1e-2, weight_decay=0.1)
    tx, one = multi_steps(make(), every_k_schedule=K), make()
    step, big_step = jitted(tx), jitted(one)
    state, big_state, start, big_params = tx.init(params), one.init(params), params, params
    for i in range(5):
        lengths = [(3, 1, 0, 2), (0, 0, 1, 3), (1, 2, 3, 3)][i % 3]
        micro, big = group(i, lengths)
        for j, batch in enumerate(micro):
            grads, factors = net_statistics(params, batch)
            updates, state = step(grads, state, params, factors)
            assert bool(has_updated(state)) == (j == K - 1)
            assert any(bool(u.any()) for u in jax.tree.leaves(updates)) == (j == K - 1)
            params = optax.apply_updates(params, updates)
        grads, factors = net_statistics(big_params, big)
        updates, big_state = big_step(grads, big_state, big_params, factors)
        big_params = optax.apply_updates(big_params, updates)
    assert_close(params, big_params, 1e-10)
    assert_close(state.inner.average, big_state.average, 1e-10)
    assert not jnp.allclose(params["left"]["kernel"], start["left"]["kernel"], rtol=1e-2)
    assert int(state.inner.step) == 5 and int(state.skipped) == 0 and int(state.empty) == 0


def test_micro_batches_weigh_by_their_terms_for_plain_transformations():
    params = {"w": jnp.zeros(2)}
    tx = multi_steps(optax.sgd(1.0), 3)
    state = tx.init(params)
    data = [(1, jnp.array([1.0, 0.0])), (0, jnp.array([jnp.nan, 1.0])), (3, jnp.array([5.0, 4.0]))]
    for terms, gradient in data:
        updates, state = tx.update({"w": gradient}, state, params, terms=terms)
    assert_close(updates, {"w": -jnp.array([4.0, 3.0])})
    assert int(state.skipped) == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [None, jnp.float32])
def test_gradients_count_by_terms_where_factors_are_of_some_micro_batches(params, dtype):
    """As between the collections of ``every=``: factors of nothing beside a gradient."""
    tx = multi_steps(kfac(0.1, like=like_for(params), refresh_every=1), K, accumulator_dtype=dtype)
    state, micro = tx.init(params), group(0)[0]
    collected = None
    for i, batch in enumerate(micro):
        grads, factors = net_statistics(params, batch)
        terms, factors = factors.terms, factors if i == 1 else zeros_like(factors)
        collected = factors if i == 1 else collected
        updates, state = tx.update(grads, state, params, factors=factors, terms=terms)
    one = kfac(0.1, like=like_for(params), refresh_every=1)
    grads, _ = net_statistics(params, group(0)[1])
    expected, _ = one.update(grads, one.init(params), params, factors=collected)
    assert_close(updates, expected, 1e-10 if dtype is None else 1e-5)


@pytest.mark.slow
def test_micro_batches_between_collections_weigh_in_the_pooled_gradient(params):
    objective = Objective(lambda p, x: x @ p["left"]["kernel"], Categorical())
    params = {"left": {"kernel": params["left"]["kernel"]}}
    width, classes = params["left"]["kernel"].shape
    x = jax.random.normal(jax.random.key(3), (6, width))
    batch = x, jnp.arange(6) % classes, jnp.array([True, True, True, False, True, True])
    stats = value_grad_and_factors(objective, every=2)
    like = stats.factor_shapes(params, batch)
    tx, one = multi_steps(kfac(1.0, like=like), 2), kfac(1.0, like=like)
    state = tx.init(params)
    structure = jax.tree.structure(state)
    collected = stats(params, tuple(v[:3] for v in batch), step=0).factors

    @jax.jit
    def micro_step(state, batch, step):
        _, grads, factors = stats(params, batch, step=step)
        return tx.update(grads, state, params, factors=factors)

    for step in range(2):
        updates, state = micro_step(state, tuple(v[3 * step :][:3] for v in batch), step)
    expected, after = one.update(
        jax.grad(objective)(params, batch), one.init(params), params, factors=collected
    )
    assert_close(updates, expected, 1e-10)
    assert_close(state.inner, after, 1e-10)
    assert jax.tree.structure(state) == structure
    assert like.loss_terms is not None and state.inner.average.loss_terms is None


@pytest.mark.slow
@pytest.mark.standard_promotion  # optax.adamw multiplies floats by an integer count
def test_adamw_inside_scan_equals_adamw_on_the_pooled_gradients():
    params = {"w": jnp.ones(3)}
    inner = optax.adamw(1e-2)
    tx = multi_steps(inner, 2)
    grads = jax.random.normal(jax.random.key(0), (6, 3))
    terms = jnp.array([1.0, 2.0, 5.0, 1.0, 2.0, 2.0])

    def step(carry, row):
        params, state = carry
        updates, state = tx.update({"w": row[0]}, state, params, terms=row[1])
        return (optax.apply_updates(params, updates), state), has_updated(state)

    (got, _), ended = jax.lax.scan(step, (params, tx.init(params)), (grads, terms))
    assert ended.tolist() == [False, True] * 3
    state = inner.init(params)
    pooled = (grads * terms[:, None]).reshape(3, 2, 3).sum(1) / terms.reshape(3, 2).sum(1)[:, None]
    for row in pooled:
        updates, state = inner.update({"w": row}, state, params)
        params = optax.apply_updates(params, updates)
    assert_close(got, params)


@pytest.mark.slow
def test_a_non_finite_micro_batch_is_left_out_with_its_count(params):
    like = like_for(params)
    tx, one = multi_steps(kfac(0.1, like=like), every_k_schedule=K), kfac(0.1, like=like)
    step = jitted(tx)
    micro, _ = group(0, (3, 2, 1, 2))
    rest = jax.tree.map(lambda *x: jnp.concatenate(x), *(micro[i] for i in (0, 2, 3)))
    grads, factors = net_statistics(params, rest)
    expected, _ = jitted(one)(grads, one.init(params), params, factors)
    for broken in ("gradient", "factor"):
        state = tx.init(params)
        for i, batch in enumerate(micro):
            grads, factors = net_statistics(params, batch)
            if i == 1 and broken == "gradient":
                grads["scale"] = grads["scale"].at[0].set(jnp.nan)
            if i == 1 and broken == "factor":
                bad = factors.g_sums["right/kernel"].at[0, 0].set(jnp.inf)
                factors.g_sums["right/kernel"] = bad
            updates, state = step(grads, state, params, factors)
        assert int(state.skipped) == 1 and int(state.inner.skipped) == 0
        assert bool(has_updated(state))
        assert_close(updates, expected, 1e-10)
        # The group after it is clean: nothing of the NaN stays in the accumulator.
        assert all(not x.any() for x in jax.tree.leaves(state.accumulation.acc_grads))


@pytest.mark.default(1, slow=0)
@pytest.mark.parametrize("every_k", [1, 2])
def test_a_negative_count_leaves_its_micro_batch_out(params, every_k):
    tx = multi_steps(optax.sgd(1.0), every_k)
    state, grads = tx.init(params), jax.tree.map(jnp.ones_like, params)
    for count in (2, -3):
        _, state = tx.update(grads, state, params, terms=count)
    assert int(state.skipped) == 1


@pytest.mark.exhaustive
def test_output_statistics_of_a_fully_masked_micro_batch_are_dropped_even_if_nan(params):
    tx = multi_steps(kfac(0.1, like=like_for(params)), every_k_schedule=2)
    step, state = jitted(tx), tx.init(params)
    first, masked = group(0, (3, 0, 0, 0))[0][:2]
    grads, factors = net_statistics(params, masked)
    assert all(bool(jnp.isnan(g).all()) for g in jax.tree.leaves(grads))
    nan = lambda table: {k: v * jnp.nan for k, v in table.items()}
    factors = dataclasses.replace(
        factors, g_sums=nan(factors.g_sums), diagonals=nan(factors.diagonals)
    )
    _, state = step(grads, state, params, factors)
    grads, factors = net_statistics(params, first)
    _, state = step(grads, state, params, factors)
    assert int(state.skipped) == 0
    assert float(state.inner.average.a_counts["head/kernel"]) == 2 * N  # its rows exist
    assert_close(state.inner.average["head/kernel"].g, factors["head/kernel"].g)


@pytest.mark.slow
def test_a_group_without_any_term_makes_no_update_and_is_counted(params):
    tx = multi_steps(kfac(0.1, like=like_for(params), weight_decay=0.1), every_k_schedule=2)
    step, state = jitted(tx), tx.init(params)
    for batch in group(0, (0, 0, 0, 0))[0][:2]:
        grads, factors = net_statistics(params, batch)
        updates, after = step(grads, state, params, factors)
        assert all(not x.any() for x in jax.tree.leaves(updates))
        assert_close(after.inner, state.inner, 0.0)
        state = after
    assert bool(has_updated(state)) and int(state.empty) == 1 and int(state.skipped) == 0


def test_inner_transformation_runs_once_per_group(params):
    calls = []

    def update(grads, state, params=None):
        jax.debug.callback(lambda: calls.append(1))
        return grads, state

    tx = multi_steps(optax.GradientTransformation(lambda p: optax.EmptyState(), update), K)
    step = jax.jit(lambda g, s: tx.update(g, s, terms=1))
    state = tx.init(params)
    for _ in range(2 * K):
        _, state = step(params, state)
    jax.effects_barrier()
    assert len(calls) == 2


@pytest.mark.slow
def test_a_schedule_of_groups_is_followed():
    tx = multi_steps(optax.sgd(1.0), lambda group: jnp.where(group < 1, 1, 3))
    state, ended = tx.init({"w": jnp.zeros(1)}), []
    for _ in range(7):
        updates, state = tx.update({"w": jnp.ones(1)}, state, terms=2)
        ended.append(bool(has_updated(state)))
        assert_close(updates, {"w": -jnp.full(1, float(ended[-1]))})
    assert ended == [True, False, False, True, False, False, True]


@pytest.mark.slow
def test_bases_of_the_last_micro_step_reach_the_inner_chain(params):
    grads, factors = net_statistics(params, net_batch(jax.random.key(1), 8))
    first, last = eigendecompose(factors), eigendecompose(3.0 * factors, max_condition=1e6)
    doubled = {k: s._replace(values=2 * s.values) for k, s in last.g.items()}
    last = dataclasses.replace(last, g=doubled)
    inner = optax.chain(scale_by_bases(damping=0.1), optax.sgd(1.0))
    tx = multi_steps(inner, 2)
    state = tx.init(params)
    step = jax.jit(lambda g, s, b: tx.update(g, s, params, terms=3, bases=b))
    _, state = step(grads, state, first)
    updates, state = step(grads, state, last)
    expected, _ = inner.update(grads, inner.init(params), params, bases=last)
    assert_close(updates, expected)


@pytest.mark.exhaustive
def test_factors_are_found_in_a_chain_and_given_by_like(params):
    like = like_for(params)
    batch = net_batch(jax.random.key(0), N)
    grads, factors = net_statistics(params, batch)
    seen = []

    def update(grads, state, params=None, *, factors):
        seen.append(factors)
        return grads, state

    plain = optax.GradientTransformationExtraArgs(lambda p: optax.EmptyState(), update)
    chained = multi_steps(optax.chain(kfac(0.1, like=like), optax.scale(1.0)), 1)
    updates, state = jitted(chained)(grads, chained.init(params), params, factors)
    alone = kfac(0.1, like=like)
    expected, _ = jitted(alone)(grads, alone.init(params), params, factors)
    assert_close(updates, expected)
    given = multi_steps(plain, 1, like=like)
    updates, _ = given.update(grads, given.init(params), params, factors=factors)
    assert_close(updates, grads)
    assert seen[0].layers == factors.layers


@pytest.mark.slow
def test_sums_are_double_under_x64_and_single_for_half_precision():
    double = {"w": jnp.array([1.0, 0.1])}
    tx = multi_steps(optax.identity(), 2)
    state = tx.init(double)
    _, state = tx.update(double, state, terms=3)
    updates, _ = tx.update(double, state, terms=7)
    assert_close(updates, double, 1e-15)
    half = {"w": jnp.ones(2, jnp.bfloat16)}
    state = tx.init(half)
    assert state.accumulation.acc_grads["grads"]["w"].dtype == jnp.float32
    for gradient in (256.0, 1.0):  # their sum needs more than 8 bits
        updates, state = tx.update({"w": jnp.full(2, gradient, jnp.bfloat16)}, state, terms=1)
    assert updates["w"].dtype == jnp.bfloat16
    assert float(updates["w"][0]) == float(jnp.bfloat16(257 / 2))


@pytest.mark.slow
def test_state_structure_is_stable_and_integer_leaves_pass_through(params):
    like = like_for(params)
    grads, factors = net_statistics(params, net_batch(jax.random.key(0), N))
    grads["key"] = params["key"] = jnp.arange(3)
    tx = multi_steps(kfac(0.1, like=like), 2)
    state = tx.init(params)
    updates, after = jax.jit(lambda s: tx.update(grads, s, params, factors=factors))(state)
    types = lambda t: [(x.shape, x.dtype) for x in jax.tree.leaves(t)]
    assert jax.tree.structure(state) == jax.tree.structure(after) and types(state) == types(after)
    assert jnp.array_equal(updates["key"], grads["key"])


def test_bad_arguments_are_named(params):
    grads, factors = net_statistics(params, net_batch(jax.random.key(0), N))
    with pytest.raises(ValueError, match="every_k_schedule must be at least 1, got 0"):
        multi_steps(optax.sgd(0.1), 0)
    plain = multi_steps(optax.sgd(0.1), 2)
    state = plain.init(params)
    with pytest.raises(ValueError, match="pass factors=, or terms=, got neither"):
        plain.update(grads, state, params)
    with pytest.raises(ValueError, match="no accumulator for factors=.*like="):
        plain.update(grads, state, params, factors=factors)
    tx = multi_steps(kfac(0.1, like=like_for(params)), 2)
    state = tx.init(params)
    other = random_factors((layer("w", (3, 2)),), jax.random.key(0))
    with pytest.raises(ValueError, match="factors lack the layer 'left/kernel'"):
        tx.update(grads, state, params, factors=other)


@pytest.mark.slow
def test_left_out_factors_are_zeros(params):
    tx = multi_steps(kfac(0.1, like=like_for(params)), 2)
    (one, two, *_), _ = group(0)
    left = zeros = tx.init(params)
    for batch in (one, two):
        grads, factors = net_statistics(params, batch)
        terms = factors.terms
        given = {} if batch is one else {"factors": factors}
        expected, zeros = tx.update(
            grads, zeros, params, terms=terms, factors=given.get("factors", zeros_like(factors))
        )
        found, left = tx.update(grads, left, params, terms=terms, **given)
        assert_close((found, left), (expected, zeros), 0.0)
    assert any(x.any() for x in jax.tree.leaves(found))


def by_optax(tx, every_k=2):
    """Optax's own accumulation, in double."""
    multi = optax.MultiSteps(tx, every_k, accumulator_dtype=float)
    return optax.GradientTransformationExtraArgs(multi.init, multi.update)


@pytest.mark.parametrize(
    ("inner", "name"),
    [
        (lambda: multi_steps(optax.sgd(0.1), 2), "jk.multi_steps"),
        (lambda: optax.chain(multi_steps(optax.sgd(0.1), 2), optax.scale(2.0)), "jk.multi_steps"),
        (lambda: by_optax(optax.sgd(0.1)), "optax.MultiSteps"),
        (lambda: optax.chain(optax.clip(1.0), by_optax(optax.sgd(0.1))), "optax.MultiSteps"),
        (lambda: by_optax(multi_steps(optax.sgd(0.1), 2)), "optax.MultiSteps"),
    ],
    ids=["itself", "itself in a chain", "optax", "optax in a chain", "optax around itself"],
)
def test_accumulation_inside_accumulation_is_refused(inner, name):
    with pytest.raises(ValueError, match=f"already: {name} is inside it. Use one jk.multi_steps"):
        multi_steps(inner(), 3).init({"w": jnp.zeros(2)})


@pytest.mark.exhaustive
def test_optax_multi_steps_around_kfac_takes_the_last_factors_for_all_and_says_nothing(params):
    rows = 32
    x, y, _ = net_batch(jax.random.key(0), K * rows)
    big = (x, y, jnp.ones(K * rows, bool))
    grads, factors = net_statistics(params, big)
    tx = kfac(0.1, like=jax.eval_shape(lambda: factors), damping=1e-3, norm_constraint=None)
    expected, _ = jitted(tx)(grads, tx.init(params), params, factors)

    def error(wrapped):
        state, updates, update = wrapped.init(params), None, jitted(wrapped)
        for i in range(K):
            batch = tuple(v[i * rows : (i + 1) * rows] for v in big)
            grads, factors = net_statistics(params, batch)
            with jax.numpy_dtype_promotion("standard"):  # optax multiplies arrays by booleans
                updates, state = update(grads, state, params, factors)
        wrong = optax.tree.norm(optax.tree.sub(updates, expected))
        return float(wrong / optax.tree.norm(expected))

    assert error(multi_steps(tx, K)) < 1e-10
    assert error(by_optax(tx, K)) == pytest.approx(18.9, rel=0.1)  # the docstrings' number


def test_one_micro_batch_a_step_is_the_inner_transformation_without_accumulators(params):
    def update(grads, state, params=None, *, factors):
        return grads, {"sum": jax.tree.map(jnp.add, state["sum"], grads), "factors": factors}

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return {"sum": zeros, "factors": zeros_like(like_for(params))}

    plain = optax.GradientTransformationExtraArgs(init, update)
    tx = multi_steps(plain, 1)
    state, plain_state = tx.init(params), init(params)
    assert not jax.tree.leaves(state.accumulation.acc_grads)
    step = jitted(tx)
    for seed in range(2):
        grads, factors = net_statistics(params, net_batch(jax.random.key(seed), N))
        updates, state = step(grads, state, params, factors)
        expected, plain_state = update(grads, plain_state, factors=factors)
        assert_close(updates, expected, 0.0)
        assert_close(jax.tree.leaves(state.inner), jax.tree.leaves(plain_state), 0.0)
    assert bool(has_updated(state)) and int(state.accumulation.gradient_step) == 2
    bad = jax.tree.map(lambda x: x * jnp.nan, grads)
    updates, after = step(bad, state, params, factors)
    assert not any(x.any() for x in jax.tree.leaves(updates))
    assert_close(after.inner, state.inner, 0.0)
    assert (int(after.skipped), int(after.empty)) == (1, 1)
    updates, after = step(bad, after, params, zeros_like(factors))
    assert not any(x.any() for x in jax.tree.leaves(updates))
    assert (int(after.skipped), int(after.empty)) == (1, 2)


@pytest.mark.exhaustive
def test_one_micro_batch_a_step_takes_the_memory_of_the_inner_transformation():
    params = {"w": jnp.zeros((256, 256), jnp.bfloat16), "v": jnp.zeros((256, 256), jnp.bfloat16)}

    def compiled_bytes(tx, **extra):
        def step(params, state, x):
            loss = lambda p: jnp.square(jnp.tanh(x @ p["w"]) @ p["v"]).mean(dtype=jnp.float32)
            updates, state = tx.update(jax.grad(loss)(params), state, params, **extra)
            return optax.apply_updates(params, updates), state

        state, x = jax.eval_shape(tx.init, params), jnp.ones((4, 256), jnp.bfloat16)
        lowered = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, x)
        analysis = lowered.compile().memory_analysis()
        return np.array([analysis.temp_size_in_bytes, analysis.argument_size_in_bytes])

    one_copy = sum(x.nbytes for x in params.values())
    sgd = optax.sgd(1e-3, momentum=0.9)
    alone, one, two = (
        compiled_bytes(sgd),
        compiled_bytes(multi_steps(sgd, 1), terms=4),
        compiled_bytes(multi_steps(sgd, 2), terms=4),
    )
    assert (one - alone <= [one_copy // 2, 1024]).all(), (
        alone,
        one,
    )  # no update in place: a matrix
    assert two[1] - alone[1] >= 2 * one_copy, (alone, two)  # sums in float32
