"""``axis_name=``: on mapped axes everything is reduced once, or no device decides alone.

The oracle is one device with the rows of all.
"""

import dataclasses
import functools
import itertools
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkfac as jk
from tests._mapped_programs import (
    AXIS,
    FORMS,
    OPTIMIZERS,
    differences,
    largest_difference,
    over,
    parameters,
    rows_of,
    training,
)

pytestmark = pytest.mark.usefixtures("x64")
TERMS = ("all", "mask", "weights")
PARAMS = {"w": np.arange(12.0).reshape(3, 4) / 12}
X, Y = np.sin(np.arange(24.0)).reshape(8, 3), np.arange(8) % 4
MASK = np.arange(8) % 5 < 2  # of two devices, the first keeps two terms and the second three
MASK[:2] = False
LINEAR = jk.Objective(lambda p, x: x @ p["w"], jk.Categorical())


def numbers(stats, params, batch, **call):
    """Value, gradient, sums, counts, and what adaptation reads: the loss and its curvature."""
    value, grads, factors = stats(params, batch, **call)
    adaptation = stats.adaptation(params, batch)
    moved = jax.tree.map(jnp.cos, params)
    curvature = jk.operators.ggn(
        *adaptation["curvature"][:3], axis_name=adaptation["curvature"].axes
    )
    arrays = dataclasses.replace(factors, origin=None)
    along = curvature.forms([{"w": moved["w"]}, {"w": grads["w"]}]) if "w" in params else ()
    loss = adaptation["value"], adaptation["value_fn"](moved)
    return value, grads, arrays, loss, curvature @ moved, along, curvature.loss_terms


def assert_as_one(form, one, stats, params, batch, rtol=1e-12):
    """On two devices, results are those of ``one``, a function of parameters and batch."""
    found = over(form, 2, functools.partial(numbers, stats))(params, batch)
    expected = jax.jit(one)(params, batch)
    assert all((x == x[:1]).all() for x in jax.tree.leaves(found))  # equal on all devices
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x[0], y, rtol=rtol, atol=1e-14 * np.abs(y).max())


# ---------------- statistics


def test_masks_that_differ_between_devices_are_pooled():
    """Written out for a linear classifier."""

    def of(params, batch):
        value, grads, factors = jk.value_grad_and_factors(LINEAR, axis_name=AXIS)(params, batch)
        return value, grads, factors.g_sums, factors.terms

    value, grads, g_sums, terms = over("pmap", 2, of)(PARAMS, (X, Y, MASK))
    exponentials = np.exp(X @ PARAMS["w"])
    probabilities = exponentials / exponentials.sum(1, keepdims=True)
    errors = (probabilities - np.eye(4)[Y])[MASK]
    losses = -np.log(probabilities[np.arange(8), Y])[MASK]
    for device in (0, 1):
        assert terms[device] == float(MASK.sum())
        np.testing.assert_allclose(value[device], losses.mean(), rtol=1e-12)
        np.testing.assert_allclose(grads["w"][device], X[MASK].T @ errors / len(errors), rtol=1e-12)
        np.testing.assert_allclose(g_sums["w"][device], errors.T @ errors, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("terms", TERMS)
def test_statistics_of_two_devices_are_those_of_all_rows(terms, form):
    beside = {"all": (), "mask": (MASK,), "weights": (np.where(MASK, np.arange(8.0), 0),)}[terms]
    one = functools.partial(numbers, jk.value_grad_and_factors(LINEAR))
    assert_as_one(
        form, one, jk.value_grad_and_factors(LINEAR, axis_name=AXIS), PARAMS, (X, Y, *beside)
    )


OPTIONS = {
    "exact": {"fisher": "exact"},
    "forward": {"fisher": "forward"},
    "reduce": {"sharing": "reduce"},
    "blocks": {"scales": "full_block", "bias": "separate"},
    "by example": {"scales": "exact_diagonal"},
    "packed": {"packed": True},
}


def scaled(p, x):
    h, _ = jax.lax.scan(jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None)), x, p["s"])
    return h @ p["w"] * p["g"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("options", OPTIONS)
def test_every_kind_of_statistics_is_that_of_all_rows(options, form):
    draw = np.random.default_rng(0)
    shapes = {"s": (2, 3, 3), "w": (3, 4), "g": (4,)}
    params = {name: jnp.asarray(draw.normal(size=shape)) for name, shape in shapes.items()}
    x, y = jnp.asarray(draw.normal(size=(8, 2, 3))), jnp.arange(16).reshape(8, 2) % 4
    mask, objective = y * np.arange(8)[:, None] % 5 > 1, jk.Objective(scaled, jk.Categorical())
    stats = jk.value_grad_and_factors(objective, **OPTIONS[options])

    def of(stats, params, batch):
        return dataclasses.replace(stats(params, batch).factors, origin=None)

    mapped = jk.value_grad_and_factors(objective, axis_name=AXIS, **OPTIONS[options])
    found = over(form, 2, functools.partial(of, mapped))(params, (x, y, mask))
    assert largest_difference(found, of(stats, params, (x, y, mask))) < 1e-12


def test_rows_by_example_are_not_added_to_those_of_another_device():
    """Without ``axis_name=`` too, where JAX tracks the axis and factors are those of all rows."""
    stats = jk.value_grad_and_factors(LINEAR, sharing="reduce")
    of = lambda p, batch: stats(p, batch).factors["w"].g
    found = over("tracked", 2, of)(PARAMS, (X, Y))
    np.testing.assert_allclose(found[0], of(PARAMS, (X, Y)), rtol=1e-12)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fisher", ["empirical", "exact"])
def test_two_outputs_have_their_own_counts(fisher, form):
    outputs = lambda p, x: (x @ p["w"], jnp.tanh(x @ p["w"]))
    objective = jk.Objective(outputs, (jk.Categorical(), jk.Gaussian()))
    batch = (X, (Y, np.cos(np.arange(32.0)).reshape(8, 4)), (MASK, None))
    one = functools.partial(numbers, jk.value_grad_and_factors(objective, fisher=fisher))
    stats = jk.value_grad_and_factors(objective, fisher=fisher, axis_name=AXIS)
    assert_as_one(form, one, stats, PARAMS, batch)


def marked(p, batch):
    x, y, mask = batch
    z = jk.mark_outputs(x @ p["w"], jk.Categorical(), mask=mask)
    losses = -jnp.take_along_axis(jax.nn.log_softmax(z), y[:, None], -1)[:, 0]
    return jnp.where(mask, losses, 0).sum() / jnp.maximum(mask.sum(dtype=x.dtype), 1)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fisher", ["empirical", "exact"])
def test_a_marked_loss_enters_with_its_share_of_all_terms(fisher, form):
    one = functools.partial(numbers, jk.value_grad_and_factors(marked, fisher=fisher))
    stats = jk.value_grad_and_factors(marked, fisher=fisher, axis_name=AXIS)
    assert_as_one(form, one, stats, PARAMS, (X, Y, MASK))


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", FORMS)
def test_the_fisher_of_several_marks_is_that_of_all_terms(form):
    """Their losses are means of each device's terms; their cotangents are rescaled."""

    def loss(p, batch):
        z = jk.mark_outputs(jnp.tanh(batch[0] @ p["v"]), jk.Gaussian(), weight=0.5)
        return marked(p, batch) + 0.25 * jnp.square(z).sum(-1).mean()

    params = {**PARAMS, "v": PARAMS["w"] - 0.4}

    def of(stats, params, batch):
        return dataclasses.replace(stats(params, batch).factors, origin=None)

    stats = jk.value_grad_and_factors(loss, axis_name=AXIS)
    found = over(form, 2, functools.partial(of, stats))(params, (X, Y, MASK))
    one = of(jk.value_grad_and_factors(loss), params, (X, Y, MASK))
    assert largest_difference(found, one) < 1e-12


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", FORMS)
def test_a_scalar_loss_enters_equally(form):
    loss = lambda p, batch: jnp.square(batch @ p["w"]).mean()

    def of(stats, params, batch):
        value, grads, factors = stats(params, batch)
        return value, grads, dataclasses.replace(factors, origin=None)

    found = over(form, 2, functools.partial(of, jk.value_grad_and_factors(
        loss, loss_terms=4, axis_name=AXIS)))(PARAMS, X)  # fmt: skip
    one = of(jk.value_grad_and_factors(loss, loss_terms=8), PARAMS, X)
    assert largest_difference(found, one) < 1e-12


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("marks", [True, False])
def test_a_loss_that_is_a_mean_over_devices_already_is_not_averaged_again(marks, form):
    def loss(p, batch, *, mean=lambda x: x):
        z = batch[0] @ p["w"]
        z = jk.mark_outputs(z, jk.Categorical()) if marks else z
        losses = -jnp.take_along_axis(jax.nn.log_softmax(z), batch[1][:, None], -1)
        return mean(losses.mean())

    def of(axis, params, batch):
        mean = (lambda x: x) if axis is None else (lambda x: jax.lax.pmean(x, axis))
        terms = None if marks else len(batch[1])
        fn = functools.partial(loss, mean=mean)
        stats = jk.value_grad_and_factors(fn, axis_name=axis, loss_terms=terms)
        value, grads, factors = stats(params, batch)
        adapted = stats.adaptation(params, batch) if marks else {"value": value}
        return value, grads, dataclasses.replace(factors, origin=None), adapted["value"]

    found = over(form, 2, functools.partial(of, AXIS))(PARAMS, (X, Y))
    one = jax.jit(functools.partial(of, None))(PARAMS, (X, Y))
    assert largest_difference(found, one) < 1e-12


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", FORMS)
def test_a_second_pass_and_measured_eigenvalues_are_those_of_all_rows(form, capsys):
    unit = jk.Objective(lambda p, x: x @ (p["w"] / jnp.linalg.norm(p["w"])), jk.Categorical())
    bases = jk.eigendecompose(jk.value_grad_and_factors(LINEAR)(PARAMS, (X, Y)).factors)

    def of(axis, params, batch):
        second = jk.value_grad_and_factors(unit, axis_name=axis)(params, batch).factors
        stats = jk.value_grad_and_factors(LINEAR, axis_name=axis)
        return second.diagonals, stats(params, batch, bases=bases).factors["w"].corrected

    found = over(form, 2, functools.partial(of, AXIS))(PARAMS, (X, Y, MASK))
    assert largest_difference(found, of(None, PARAMS, (X, Y, MASK))) < 1e-12


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", FORMS)
def test_operators_and_measured_eigenvalues_take_the_axis_themselves(form):
    bases = jk.eigendecompose(jk.value_grad_and_factors(LINEAR)(PARAMS, (X, Y)).factors)
    vector = jax.tree.map(jnp.cos, PARAMS)

    def of(axis, params, rows):
        *batch, labels = rows
        options = {"exact": {}, "empirical": {}, "mc": {"labels": labels[None]}}
        products = [
            jk.operators.fisher(LINEAR, params, batch, fisher=name, axis_name=axis, **given)
            for name, given in options.items()
        ]
        measured = jk.correct_eigenvalues(LINEAR, bases, axis_name=axis)(params, batch)
        return [operator @ vector for operator in products], measured["w"].raw_values

    rows = (X, Y, MASK, Y[::-1].copy())
    found = over(form, 2, functools.partial(of, AXIS))(PARAMS, rows)
    assert largest_difference(found, of(None, PARAMS, rows)) < 1e-12


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", FORMS)
def test_each_device_draws_labels_of_its_own(form):
    """With equal rows on both devices, G differs from that of one device: its labels do."""
    stats = lambda **axes: jk.value_grad_and_factors(LINEAR, fisher="mc", **axes)
    key, (x, y) = jax.random.key(0), (X[:4], Y[:4])
    both = jax.tree.map(lambda x: np.concatenate([x, x]), (x, y))
    of = lambda p, batch: stats(axis_name=AXIS)(p, batch, key).factors["w"].g
    found, one = over(form, 2, of)(PARAMS, both), stats()(PARAMS, (x, y), key).factors["w"].g
    assert np.abs(found[0] - one).max() > 0.01


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("options", [{"every": 2}, {"collect": 2}])
def test_factors_of_some_steps_and_groups(options, form):
    draw = np.random.default_rng(0)
    shapes = {"s": (2, 3, 3), "w": (3, 4), "g": (4,)}
    params = {name: jnp.asarray(draw.normal(size=shape)) for name, shape in shapes.items()}
    objective = jk.Objective(scaled, jk.Categorical())

    def of(axis, params, batch):
        stats = jk.value_grad_and_factors(objective, axis_name=axis, **options)
        outs = [stats(params, batch, step=jnp.int32(step)) for step in (0, 1)]
        return [(x.value, x.grads, dataclasses.replace(x.factors, origin=None)) for x in outs]

    found = over(form, 2, functools.partial(of, AXIS))(params, (X, Y, MASK))
    expected = jax.jit(functools.partial(of, None))(params, (X, Y, MASK))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x[0], y, rtol=1e-10, atol=1e-14)


def test_shapes_need_no_map_and_their_origin_names_the_axis():
    stats = jk.value_grad_and_factors(LINEAR, axis_name=AXIS)
    like = stats.factor_shapes(PARAMS, (X, Y))
    assert like.g_sums["w"].shape == (4, 4)
    assert like.origin is not None and like.origin.axes == (AXIS,)
    assert jk.kfac(0.1, like=like).init(PARAMS).average.origin.axes is None


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", ["pmap", "tracked", "untracked"])
def test_shapes_of_a_masked_loss_inside_of_a_map(form):
    stats = jk.value_grad_and_factors(marked, axis_name=AXIS)
    seen = []

    def of(params, batch):
        seen.append(stats.factor_shapes(params, (*batch, batch[1] > 0)).g_sums["w"].shape)
        return params

    traced(form, of)
    assert seen[0] == (4, 4)
    assert stats.factor_shapes(PARAMS, (X, Y, MASK)).g_sums["w"].shape == (4, 4)


# ---------------- training


CASES = list(itertools.product(FORMS, OPTIMIZERS, ("empirical", "exact", "mc"), TERMS))


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_three_steps_on_two_devices_are_those_of_one(case):
    (difference,) = differences(2, 3, [case]).values()
    assert difference < 1e-10


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", [c for c in CASES if c[2:] == ("exact", "mask")], ids=", ".join)
def test_twenty_steps_on_two_devices_are_those_of_one(case):
    (difference,) = differences(2, 20, [case]).values()
    assert difference < 1e-6


@pytest.mark.exhaustive
def test_eight_devices_take_the_steps_of_one():
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    command = [sys.executable, "-m", "tests._device_programs", "mapped"]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 18
    assert max(found.values()) < 1e-10, found


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_optimizer_reduces_what_comes(optimizer, form):
    """``axis_name=`` of the optimizer alone; where JAX sums gradients itself, they are divided."""
    terms = "all" if form == "tracked" else "weights"
    one = jax.jit(training(optimizer, "exact", 3))(parameters(), rows_of(terms))
    fn = training(optimizer, "exact", 3, tx_axis=AXIS)
    found = over(form, 2, fn)(parameters(), rows_of(terms))
    assert largest_difference(found[0], one[0]) < 1e-10


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", FORMS)
def test_a_mean_by_the_user_changes_nothing(form):
    def step(again, params, batch):
        stats = jk.value_grad_and_factors(LINEAR, axis_name=AXIS)
        out = stats(params, batch)
        if again:
            out = out._replace(**jax.lax.pmean({"value": out.value, "grads": out.grads}, AXIS))
        tx = jk.kfac(0.1, like=stats.factor_shapes(params, batch), axis_name=AXIS)
        updates = tx.update(out.grads, tx.init(params), params, factors=out.factors)[0]
        return out.value, updates

    results = [
        over(form, 2, functools.partial(step, again))(PARAMS, (X, Y, MASK)) for again in (0, 1)
    ]
    assert largest_difference(*results) < 1e-14


@pytest.mark.slow
def test_micro_batches_of_every_device_are_pooled():
    def steps(axis, params, batch):
        stats = jk.value_grad_and_factors(LINEAR, axis_name=axis)
        tx = jk.multi_steps(jk.kfac(0.1, like=stats.factor_shapes(params, batch)), 2)
        state = tx.init(params)
        for _ in range(2):
            _, grads, factors = stats(params, batch)
            updates, state = tx.update(grads, state, params, factors=factors)
        return updates

    found = over("pmap", 2, functools.partial(steps, AXIS))(PARAMS, (X, Y, MASK))
    assert largest_difference(found, steps(None, PARAMS, (X, Y, MASK))) < 1e-12


# ---------------- what is refused, when traced


def traced(form, fn, *args):
    """Trace a mapped function; nothing is compiled."""
    rows = jax.ShapeDtypeStruct((2, 4, 3), jnp.float64), jax.ShapeDtypeStruct((2, 4), jnp.int64)
    if form.startswith("pmap"):
        mapped = jax.pmap(fn, None if form == "pmap, unnamed" else AXIS, in_axes=(None, 0))
        return jax.eval_shape(mapped, PARAMS, rows)
    if form == "vmap":
        return jax.eval_shape(jax.vmap(fn, axis_name=AXIS, in_axes=(None, 0)), PARAMS, rows)
    mesh = jax.make_mesh((2,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    inside = lambda p, rows: fn(p, jax.tree.map(lambda x: x[0], rows))
    specs = {"in_specs": (P(), P(AXIS)), "out_specs": P()}
    mapped = jax.shard_map(inside, mesh=mesh, **specs, check_vma=form == "tracked")
    return jax.eval_shape(mapped, PARAMS, rows)


def step_of(optimizer, *, inside=lambda fn: fn, stats_axis=None, tx_axis=None, wrap=lambda tx: tx):
    """One step that returns the parameters after it."""
    stats = jk.value_grad_and_factors(LINEAR, axis_name=stats_axis)

    def step(params, batch):
        like = stats.factor_shapes(params, batch)
        tx = wrap(OPTIMIZERS[optimizer](like, axis_name=tx_axis))

        def update(params):
            _, grads, factors = stats(params, batch)
            extra = stats.adaptation(params, batch) if optimizer == "adaptive" else {}
            return tx.update(grads, tx.init(params), params, factors=factors, **extra)[0]

        return inside(update)(params)

    return step


@pytest.mark.default(2, slow=2)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("form", ["pmap", "untracked", "pmap, unnamed"])
def test_what_decides_from_local_numbers_is_refused(form, optimizer):
    name = "the unnamed axis of jax.pmap" if "unnamed" in form else "the mapped axis 'rows'"
    with pytest.raises(ValueError, match=f"own gradient and factors along {name}.*axis_name="):
        traced(form, step_of(optimizer))


@pytest.mark.default(1, slow=0)
@pytest.mark.parametrize(
    "inside",
    [jax.jit, lambda fn: lambda p: jax.lax.scan(lambda c, _: (fn(c), None), p, length=2)[0]],
)
def test_in_jit_and_in_a_loop_too(inside):
    with pytest.raises(ValueError, match="along the mapped axis 'rows'"):
        traced("pmap", step_of("fixed", inside=inside))


def test_micro_batches_of_one_device_are_refused():
    wrap = functools.partial(jk.multi_steps, every_k_schedule=2)
    with pytest.raises(ValueError, match=r"jk\.multi_steps: every device has its own gradient"):
        traced("pmap", step_of("fixed", wrap=wrap))


def test_on_a_tracked_axis_the_loss_of_one_device_is_refused():
    with pytest.raises(ValueError, match=r"value= is that of one device's batch.*axis_name='rows'"):
        traced("tracked", step_of("adaptive"))


def adapted_by_hand(what, params, batch):
    """One step whose loss and curvature are averaged by hand, but for ``what``."""
    stats = jk.value_grad_and_factors(LINEAR)
    tx = jk.kfac(like=stats.factor_shapes(params, batch))
    _, grads, factors = stats(params, batch)
    local = stats.adaptation(params, batch)
    mean = lambda x: jax.lax.pmean(x, AXIS)
    given = {
        "value": mean(local["value"]),
        "value_fn": lambda p: mean(local["value_fn"](p)),
        "curvature": jk.operators.from_function(
            lambda op, v: jax.tree.map(mean, op @ v),
            jk.operators.ggn(LINEAR, params, batch),
            params,
        ),
    }
    if what is not None:
        given[what] = local[what]
    return tx.update(grads, tx.init(params), params, factors=factors, **given)[0]


@pytest.mark.default(1, slow=0)
@pytest.mark.parametrize("what", ["curvature", "value_fn"])
def test_on_a_tracked_axis_no_part_of_the_adaptation_may_be_local(what):
    with pytest.raises(ValueError, match="of one device's batch|of value_fn is that of one device"):
        traced("tracked", functools.partial(adapted_by_hand, what))


@pytest.mark.slow
def test_on_a_tracked_axis_what_is_averaged_by_hand_needs_no_name():
    traced("tracked", functools.partial(adapted_by_hand, None))


@pytest.mark.default(1, slow=0)
@pytest.mark.parametrize(
    ("form", "axes"),
    # vmap(axis_name=) does not show: nothing can be refused there.
    [("pmap", {"stats_axis": ()}), ("untracked", {"tx_axis": ()}), ("vmap", {})],
)
def test_what_is_reduced_by_hand_is_not_refused(form, axes):
    traced(form, step_of("fixed", **axes))


@pytest.mark.slow
def test_one_device_has_no_other():
    rows = jax.ShapeDtypeStruct((1, 4, 3), jnp.float64), jax.ShapeDtypeStruct((1, 4), jnp.int64)
    mapped = jax.pmap(step_of("fixed"), AXIS, in_axes=(None, 0), devices=jax.devices()[:1])
    jax.eval_shape(mapped, PARAMS, rows)


@pytest.mark.default(1, slow=0)
@pytest.mark.parametrize("axes", [{"stats_axis": "others"}, {"tx_axis": "others"}])
def test_a_name_that_no_map_has_is_refused(axes):
    with pytest.raises(ValueError, match=r"axis_name='others' is no axis.*the axes here are 'row"):
        traced("pmap", step_of("fixed", **axes))
    with pytest.raises(ValueError, match=r"axis_name='others' is no axis.*none is here"):
        step_of("fixed", **axes)(PARAMS, (jnp.asarray(X), jnp.asarray(Y)))


def test_axes_that_only_the_optimizer_has_are_refused():
    with pytest.raises(ValueError, match=r"axis_name= has 'more', and .*axis_name=\('rows',\)"):
        traced("pmap", step_of("fixed", stats_axis=AXIS, tx_axis=(AXIS, "more")))


def test_curvature_of_one_device_beside_reduced_factors_is_refused():
    stats = jk.value_grad_and_factors(LINEAR, axis_name=AXIS)

    def step(params, batch):
        tx = jk.kfac(like=stats.factor_shapes(params, batch))
        _, grads, factors = stats(params, batch)
        extra = {**stats.adaptation(params, batch)}
        extra["curvature"] = jk.operators.ggn(LINEAR, params, batch)
        return tx.update(grads, tx.init(params), params, factors=factors, **extra)[0]

    with pytest.raises(ValueError, match=r"curvature= is that of one device's batch.*axis_name="):
        traced("pmap", step)


def test_each_axis_is_named_once():
    with pytest.raises(ValueError, match=r"axis_name=\('i', 'i'\): expected each name once"):
        jk.value_grad_and_factors(LINEAR, axis_name=("i", "i"))


def test_a_budget_runs_outside_of_maps():
    with pytest.raises(ValueError, match="axis_name='rows' and max_factor_bytes="):
        jk.value_grad_and_factors(LINEAR, axis_name=AXIS, max_factor_bytes="1GB")


# ---------------- states on several devices


def copies(x, y, *, device_axis):
    """An array with one copy on each of two devices, which may differ."""
    mesh = jax.make_mesh((2,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    place = NamedSharding(mesh, P(AXIS) if device_axis else P())
    shape = (2, *np.shape(x)) if device_axis else np.shape(x)
    placed = [
        jax.device_put(v[None] if device_axis else v, device)
        for v, device in zip((x, y), jax.devices(), strict=False)
    ]
    return jax.make_array_from_single_device_arrays(shape, place, placed)


@pytest.mark.default(1, slow=0)
@pytest.mark.parametrize("device_axis", [False, True])
def test_copies_of_a_state_that_differ_are_named(device_axis):
    like = jk.value_grad_and_factors(LINEAR).factor_shapes(PARAMS, (X, Y))
    state = jk.kfac(0.1, like=like).init(PARAMS)
    equal = jax.tree.map(lambda x: copies(x, x, device_axis=device_axis), state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jk.check_state({"opt": equal})
    momentum = state.momentum["w"]
    changed = momentum.at[1, 2].add(1e-300), momentum  # any bit
    apart = equal._replace(momentum={"w": copies(*changed, device_axis=device_axis)})
    with pytest.warns(UserWarning, match=r"state\['opt'\]\.momentum\['w'\], so each has"):
        jk.check_state({"opt": apart})
