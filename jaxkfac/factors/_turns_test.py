"""Factors in turns: a round of groups averages to what one collection of all of them gives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac._errors import UnknownLayerError
from jaxkfac.blocks import LongSum, of_parameters, update_average, zeros_like
from jaxkfac.factors import Categorical, Objective, value_grad_and_factors
from jaxkfac.factors._options import check_collect
from jaxkfac.interception import mark_outputs

KEYS = jax.random.split(jax.random.key(0), 8)


def normal(number, *shape):
    return 0.4 * jax.random.normal(KEYS[number], shape)


def scanned(iterations, width=4, *, wrap=lambda f: f):
    """A scan of dense layers with biases and scales, between two layers outside of it."""
    params = {
        "in": normal(0, 3, width),
        "blocks": {
            "w": normal(1, iterations, width, width),
            "b": normal(2, iterations, width),
            "scale": 1 + normal(3, iterations, width),
        },
        "head": normal(4, width, 3),
    }

    def block(x, p):
        return jnp.tanh(x @ p["w"] + p["b"]) * p["scale"], None

    def apply(p, x):
        x, _ = jax.lax.scan(wrap(block), x @ p["in"], p["blocks"])
        return x @ p["head"]

    return Objective(apply, Categorical()), params, (normal(5, 5, 3), jnp.arange(5) % 3)


def nested():
    """A scan over groups of a rematted scan over layers, with a weight that all of them share."""
    params = {
        "inner": normal(0, 3, 2, 4, 4),
        "outer": normal(1, 3, 4, 4),
        "shared": normal(2, 4, 4),
        "head": normal(3, 4, 3),
    }

    def apply(p, x):
        def group(x, w):
            def layer(x, w):
                return jnp.tanh(x @ w + x @ p["shared"]), None

            x, _ = jax.lax.scan(jax.checkpoint(layer), x, w["inner"])
            return x @ (2.0 * w["outer"]), None

        x, _ = jax.lax.scan(group, x, {k: p[k] for k in ("inner", "outer")}, reverse=True)
        return x @ p["head"]

    return Objective(apply, Categorical()), params, (normal(5, 5, 4), jnp.arange(5) % 3)


def tied():
    """Token rows of an embedding that is the head too, around attention-like shared inputs."""
    params = {
        "table": normal(0, 6, 4),
        "blocks": {name: normal(i, 5, 4, 4) for i, name in enumerate("qkv", 1)},
    }

    def apply(p, ids):
        def block(x, w):
            q, k, v = (x @ w[name] for name in "qkv")
            return x + jax.nn.softmax(q @ k.mT) @ v, None

        x, _ = jax.lax.scan(block, p["table"][ids], p["blocks"])
        return x @ p["table"].T

    ids = jnp.arange(12).reshape(3, 4) % 6
    return Objective(apply, Categorical()), params, (ids, jnp.roll(ids, 1, 1))


def images():
    """Convolutions in a scan."""
    params = {"conv": normal(0, 4, 3, 3, 2, 2), "head": normal(1, 2, 3)}

    def apply(p, x):
        def block(x, w):
            numbers = ("NHWC", "HWIO", "NHWC")
            out = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)
            return jnp.tanh(out), None

        x, _ = jax.lax.scan(block, x, p["conv"])
        return x.mean((1, 2)) @ p["head"]

    return Objective(apply, Categorical()), params, (normal(2, 3, 4, 4, 2), jnp.arange(3))


def unrolled(width=4):
    """Layers without a scan: two with one input, a lone scale, and a weight that is used twice."""
    params = {
        "a": {"w": normal(0, 3, width), "b": normal(1, width)},
        "b": normal(2, 3, width),
        "scale": 1 + normal(3, width),
        "twice": normal(4, width, width),
        "head": normal(5, width, 3),
    }

    def apply(p, x):
        x = jnp.tanh(x @ p["a"]["w"] + p["a"]["b"]) * (x @ p["b"]) * p["scale"]
        return jnp.tanh(jnp.tanh(x @ p["twice"]) @ p["twice"].T) @ p["head"]

    return Objective(apply, Categorical()), params, (normal(6, 5, 3), jnp.arange(5) % 3)


def computed():
    """A weight computed from two parameters, which have diagonals from a second pass."""
    params = {"v": normal(0, 5, 4, 4), "u": normal(1, 3, 4), "g": jnp.ones(4), "h": normal(2, 4, 3)}

    def apply(p, x):
        x = x @ (p["u"] / jnp.linalg.norm(p["u"], axis=0) * p["g"])
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["v"])
        return x @ p["h"]

    return Objective(apply, Categorical()), params, (normal(5, 5, 3), jnp.arange(5) % 3)


def as_float64(tree):
    inexact = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
    return jax.tree.map(lambda x: x.astype(jnp.float64) if inexact(x) else x, tree)


def average_of(stats, params, batches, *, decay, static, rounds=1, **arguments):
    """The average of rounds of groups, one batch after the other."""
    advance = jax.jit(functools.partial(update_average, decay=decay), donate_argnums=0)
    gather = jax.jit(
        lambda params, batch, key, step: stats(params, batch, key, step=step, **arguments).factors,
        static_argnames="step" if static else (),
    )
    groups = stats.options.collect
    average = zeros_like(stats.factor_shapes(params, batches[0]))
    # With more groups than iterations, neighboring groups contain the same one.
    full = min([len(x) for x in average.turn.counts.values() if x.ndim] + [groups])
    for step in range(rounds * groups):
        number = step % groups if static else step
        factors = gather(params, batches[step % len(batches)], KEYS[7], step=number)
        assert factors.turn.number == step % groups
        early = full == groups and step < groups
        assert not (early and average.terms), "it is complete before every group has come"
        average = advance(average, factors)
    assert average.terms == 1
    assert static or gather._cache_size() == 1, "a program for each group"
    return average


def assert_same_means(average, factors, **tolerances):
    assert average.layers == factors.layers
    for name in factors:
        for x, y in zip(average[name], factors[name], strict=True):
            np.testing.assert_allclose(x, y, **{"rtol": 1e-12, "atol": 1e-15} | tolerances)


CASES = {
    "divisible": (lambda: scanned(6), 3, {}),
    "windows that overlap": (lambda: scanned(5), 3, {}),
    "more groups than iterations": (lambda: scanned(2), 5, {}),
    "remat inside jit": (lambda: scanned(5, wrap=lambda f: jax.jit(jax.checkpoint(f))), 2, {}),
    "nested scans": (nested, 2, {}),
    "tied weights and shared inputs": (tied, 3, {"fisher": "mc"}),
    "convolutions": (images, 2, {"fisher": "mc"}),
    "reduce, biases apart": (lambda: scanned(5), 2, {"sharing": "reduce", "bias": "separate"}),
    "blocks of scales": (lambda: scanned(5), 2, {"scales": "full_block"}),
    "exact": (lambda: scanned(5), 2, {"fisher": "exact"}),
    "forward": (lambda: scanned(4), 3, {"fisher": "forward"}),
    "packed": (lambda: scanned(3, 64), 2, {"packed": True, "fisher": "mc"}),
    "computed weights": (computed, 2, {}),
}
# In the default run windows that overlap, and triangles of windows.
SLOW = ("nested scans", "computed weights")


def marks_of(case):
    if case == "packed":
        return []
    return [pytest.mark.slow if case in SLOW else pytest.mark.exhaustive]


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("case", "decay"),
    [("windows that overlap", 0.0)] + [pytest.param(x, 0.9, marks=marks_of(x)) for x in CASES],
)
def test_a_round_on_one_batch_averages_to_all_factors_of_it(x64, case, decay):
    problem, groups, options = CASES[case]
    objective, params, batch = as_float64_problem(*problem())
    expected = jax.jit(value_grad_and_factors(objective, **options))(params, batch, KEYS[7])
    stats = value_grad_and_factors(objective, collect=groups, **options)
    average = average_of(stats, params, [batch], decay=decay, static=False)
    assert_same_means(average, expected.factors)


def as_float64_problem(objective, params, batch):
    return objective, as_float64(params), as_float64(batch)


@pytest.mark.slow
@pytest.mark.parametrize(
    "problem",
    [pytest.param(unrolled, marks=pytest.mark.exhaustive), lambda: scanned(5)],
    ids=["unrolled", "scanned"],  # which has layers outside of its scan too
)
def test_a_static_step_divides_layers_outside_of_scans(x64, problem):
    objective, params, batch = as_float64_problem(*problem())
    expected = value_grad_and_factors(objective)(params, batch)
    stats = value_grad_and_factors(objective, collect=2)
    average = average_of(stats, params, [batch], decay=0.9, static=True)
    assert_same_means(average, expected.factors)
    out = [stats(params, batch, step=step) for step in range(2)]  # outside of jit
    outside = [layer.name for layer in expected.factors.layers if not layer.stack]
    has = lambda x, name: x.factors.has_arrays_of(x.factors.layer(name))
    groups = [[name for name in outside if has(x, name)] for x in out]
    assert sorted(groups[0] + groups[1]) == sorted(outside) and all(groups)
    for x in out:
        assert x.value == expected.value
        for a, b in zip(jax.tree.leaves(x.grads), jax.tree.leaves(expected.grads), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12)


def test_masks_and_positions_hold_in_every_turn(x64):
    objective, params, (ids, targets) = as_float64_problem(*tied())
    there = jnp.arange(4) < jnp.array([[4], [2], [3]])
    batch = (ids, targets, there)
    expected = jax.jit(value_grad_and_factors(objective))(params, batch, positions=there)
    stats = value_grad_and_factors(objective, collect=3)
    average = average_of(stats, params, [batch], decay=0.5, static=False, positions=there)
    assert_same_means(average, expected.factors)


@pytest.mark.slow
def test_a_loss_that_marks_its_outputs_comes_in_turns(x64):
    objective, params, (x, targets) = as_float64_problem(*scanned(5))

    def loss(params, batch):
        logits = mark_outputs(objective.apply_fn(params, batch[0]), Categorical())
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), batch[1][:, None], -1).mean()

    expected = jax.jit(value_grad_and_factors(loss))(params, (x, targets))
    stats = value_grad_and_factors(loss, collect=2)
    assert_same_means(
        average_of(stats, params, [(x, targets)], decay=0.5, static=False), expected.factors
    )


@pytest.mark.slow
@pytest.mark.parametrize("packed", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_every_iteration_decays_by_its_own_count(x64, packed):
    """NumPy: windows, masks with different numbers of terms, and a batch without any term."""
    iterations, groups, decay = 5, 3, 0.8
    objective, params, (x, targets) = as_float64_problem(*scanned(iterations, 64 if packed else 4))
    masks = [jnp.arange(5) < size for size in (5, 3, 4, 2, 0, 5, 1)]
    batches = [(x * (1 + i), targets, mask) for i, mask in enumerate(masks)]
    stats = value_grad_and_factors(objective, collect=groups, packed=packed)
    every, advance = jax.jit(value_grad_and_factors(objective)), jax.jit(update_average)
    average = zeros_like(stats.factor_shapes(params, batches[0]))
    gather = jax.jit(lambda batch, step: stats(params, batch, step=step).factors)
    means, counts, a_sums, a_counts = ({} for _ in range(4))
    for step in range(2 * groups + 1):
        batch, group = batches[step], step % groups
        average = advance(average, gather(batch, step), decay)
        factors = every(params, batch).factors
        terms = float(factors.terms)
        assert terms == int(masks[step].sum())
        for layer in factors.layers:
            windowed = bool(layer.stack) and not layer.is_diagonal
            first = group * iterations // groups if windowed else 0
            rows = range(first, first + 2) if windowed else [...]
            for row in rows:
                where, table = (layer.name, row), factors.g_sums
                table = factors.diagonals if layer.is_diagonal else table
                total = np.asarray(table[layer.name])[row]
                before = decay * counts.get(where, 0.0)
                if terms:
                    counts[where] = before + terms
                    means[where] = (before * means.get(where, 0) + total) / counts[where]
                if layer.input != layer.name or layer.is_diagonal:
                    continue
                total, new = (
                    np.asarray(table[layer.name])[row]
                    for table in (factors.a_sums, factors.a_counts)
                )
                beta = decay if new else 1.0
                a_sums[where] = beta * a_sums.get(where, 0) + total
                a_counts[where] = beta * a_counts.get(where, 0) + new
    in_full = average.unpacked()
    for (name, row), mean in means.items():
        factor = in_full[name]
        found = factor.diagonal if hasattr(factor, "diagonal") else factor.g
        np.testing.assert_allclose(found[row], mean, rtol=1e-12, atol=1e-15)
    for (name, row), total in a_sums.items():
        mean = total / a_counts[name, row]
        np.testing.assert_allclose(in_full[name].a[row], mean, rtol=1e-12, atol=1e-15)
    assert len(means) == len(counts) == iterations + 3  # and one for each other layer


@pytest.mark.exhaustive
def test_micro_batches_of_one_turn_add_up(x64):
    objective, params, (x, targets) = as_float64_problem(*scanned(5))
    stats = value_grad_and_factors(objective, collect=2)
    halves = [(x[:2], targets[:2]), (x[2:], targets[2:])]
    first, second = (2.0 * stats(params, half, step=1).factors for half in halves)
    summed = first + second
    expected = stats(params, (x, targets), step=3).factors
    assert summed.turn.number == expected.turn.number == 1 and summed.terms == 10
    for name in expected.a_sums:
        np.testing.assert_allclose(summed.a_sums[name], 2 * expected.a_sums[name], rtol=1e-12)


@pytest.mark.slow
def test_a_sum_of_two_groups_is_never_averaged():
    objective, params, batch = scanned(4)
    stats = value_grad_and_factors(objective, collect=2)
    with pytest.raises(ValueError, match="group 0 of 2 and of group 1 of 2 cannot be added"):
        stats(params, batch, step=0).factors + stats(params, batch, step=1).factors

    @jax.jit
    def both(average, one, other):
        factors = [stats(params, batch, step=step).factors for step in (one, other)]
        summed = factors[0] + factors[1]
        return update_average(average, summed, 0.5), summed.turn.number

    empty = zeros_like(stats.factor_shapes(params, batch))
    average, number = both(empty, 0, 1)
    assert number == -1
    jax.tree.map(np.testing.assert_array_equal, average, empty)
    average, number = both(empty, 1, 3)
    assert number == 1 and average.turn.number == 1


@pytest.mark.slow
def test_a_weighted_average_weighs_its_counts():
    objective, params, batch = scanned(4)
    stats = value_grad_and_factors(objective, collect=2)
    gather = jax.jit(lambda step: stats(params, batch, step=step).factors)
    average = zeros_like(stats.factor_shapes(params, batch))
    for step in range(2):
        average = update_average(average, gather(step), 0.0)
    expected = update_average(average, gather(2), 0.5)
    found = update_average(0.5 * average, gather(2), jnp.float32(0.99999994))
    for x, y in zip(jax.tree.leaves(found.g_sums), jax.tree.leaves(expected.g_sums), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5)
    step = 2.0 * gather(2)
    assert step.turn.number == 0 and step.terms == 10


@pytest.mark.slow
def test_reading_says_which_layers_have_another_turn():
    objective, params, batch = unrolled()
    factors = value_grad_and_factors(objective, collect=3)(params, batch, step=0).factors
    absent = [x.name for x in factors.layers if not factors.has_arrays_of(x)]
    assert absent and absent[0] in factors
    with pytest.raises(UnknownLayerError, match=f"group 0 of 3.*'{absent[0]}'.*update_average"):
        factors[absent[0]]
    assert set(factors.is_finite()) == set(factors) - set(absent)
    assert absent[0] in factors._repr_html_()
    assert of_parameters(factors).turn is not None


@pytest.mark.slow
def test_a_wide_scan_in_turns_holds_a_part_of_its_factors():
    """Zeros of full size, or a copy of the average, would show here."""
    objective, params, batch = scanned(8, 128, wrap=jax.checkpoint)
    nbytes = {}
    for groups in (1, 4):
        stats = value_grad_and_factors(objective, collect=groups)
        like = stats.factor_shapes(params, batch)

        def step(average, step, stats=stats):
            factors = stats(params, batch, step=step).factors
            return update_average(average, factors, 0.9)

        program = jax.jit(step, donate_argnums=0).lower(like, jnp.int32(0)).compile()
        nbytes[groups] = program.memory_analysis().temp_size_in_bytes
    matrix = 128 * 128 * 4  # A and G of eight iterations, or of two and a row that is written
    assert nbytes[1] - nbytes[4] > 2 * (8 - 2) * matrix - 3 * matrix


# ---------------- what is refused


def test_a_broken_number_of_groups_is_refused():
    with pytest.raises(ValueError, match="collect=2.5: expected a whole number"):
        check_collect(2.5, 1)


BUILT = [
    ({"collect": 0}, "collect=0: expected at least 1"),
    ({"collect": -2}, "expected at least 1"),
    ({"collect": True}, "collect=True: expected a whole number"),
    ({"collect": 2, "every": 2}, "collect=2 .* every=2 .*choose one"),
    ({"collect": 2, "max_factor_bytes": 1000}, "collect=2 .* max_factor_bytes= .*choose one"),
]


@pytest.mark.parametrize(("options", "message"), BUILT)
def test_an_unusable_number_of_groups_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        value_grad_and_factors(lambda p, x: x @ p["w"], **options)


def test_a_call_without_its_number_is_refused():
    objective, params, batch = unrolled()
    stats = value_grad_and_factors(objective, collect=2)
    with pytest.raises(ValueError, match="collect=2 collects some.*pass step="):
        stats(params, batch)
    with pytest.raises(ValueError, match="step=1.5: expected the number"):
        stats(params, batch, step=1.5)


def test_layers_without_a_scan_need_a_static_number_and_a_layer_for_each_group():
    objective, params, batch = unrolled()
    stats = value_grad_and_factors(objective, collect=2)
    with pytest.raises(ValueError, match="step= is traced here.*static_argnames='group'.*i % 2"):
        jax.jit(lambda step: stats(params, batch, step=step))(0)
    too_many = value_grad_and_factors(objective, collect=9)
    shapes = lambda: too_many.factor_shapes(params, batch)
    for call in (lambda: too_many(params, batch, step=0), shapes):
        with pytest.raises(ValueError, match="collect=9: the program has 4 layers"):
            call()


@pytest.mark.slow
def test_averages_and_sums_refuse_factors_of_other_turns():
    objective, params, batch = scanned(4)
    complete, half, third = (value_grad_and_factors(objective, collect=k) for k in (1, 2, 3))
    factors = half(params, batch, step=0).factors
    average = zeros_like(half.factor_shapes(params, batch))
    all_at_once = complete(params, batch).factors
    refused = [
        (lambda: update_average(average, all_at_once, 0.5), "collect=1, expected collect=2"),
        (lambda: update_average(all_at_once, factors, 0.5), "collect=2, expected collect=1"),
        (lambda: update_average(average, third(params, batch, step=0).factors, 0.5), "collect=3"),
        (lambda: update_average(average, average, 0.5), "are an average of factors"),
        (lambda: update_average(factors, factors, 0.5), "average: the factors of one step"),
        (lambda: factors + all_at_once, "collect=2 and collect=1 cannot be added"),
        (lambda: average + factors, "update_average adds the factors of a step"),
        (lambda: LongSum.zeros(half.factor_shapes(params, batch)), "LongSum adds complete"),
    ]
    for call, message in refused:
        with pytest.raises(ValueError, match=message):
            call()
    rows = unrolled()
    groups = value_grad_and_factors(rows[0], collect=2)

    def mixed():
        return groups(*rows[1:], step=0).factors + groups(*rows[1:], step=1).factors

    for run in (mixed, jax.jit(mixed)):
        with pytest.raises(ValueError, match="take the same step="):
            run()
