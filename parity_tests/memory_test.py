"""What saves memory and must not change a number: recomputation, released caches, bfloat16."""

import dataclasses
import gc
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch import nn

import jaxkfac as jk
from parity_tests import reference_training
from parity_tests.accumulation_test import GROUPS, OPTIMIZERS, group_size, micro_steps
from parity_tests.adapters import (
    Placement,
    Setting,
    gradient_program,
    leaf_pairs,
    linked,
    reference_loss,
)
from parity_tests.averages_test import plain_average
from parity_tests.cases import Tolerance, cases, exact, over
from parity_tests.compare import Pair
from parity_tests.factors_test import factor_pairs
from parity_tests.powers_test import JOINT, tree_pairs
from parity_tests.sides import Sides
from torch_ref import factors as ref
from torch_ref.memory import release_cache

STEPS, DECAY = 8, 0.8


# ---------------------------------------------------------------- recomputation


def kept(sides: Sides) -> Sides:
    """The same model, its activations kept."""
    device = "gpu" if sides.device.type == "cuda" else "cpu"
    return sides.kept("kept", lambda: Sides("blocks", sides.dtype, device))


def recomputed_factors(sides: Sides) -> Iterable[Pair]:
    """Value, gradient and factors: recomputed on one side, kept on the other."""
    for one, other in ((sides, kept(sides)), (kept(sides), sides)):
        yield Pair("objective", "value", one.ours().value, other.value())
        yield from tree_pairs(one.ours().grads, one.tree(other.gradients()))
        yield from factor_pairs(one, one.ours().factors[JOINT], other.sum_factors(JOINT))


def recomputed_adapters(placement: Placement) -> Callable[[Sides], Iterable[Pair]]:
    """The gradients of every adapter, likewise."""
    setting = Setting(placement)

    def gradients(sides: Sides) -> tuple[Any, nn.Module]:
        pair = linked(sides, setting)
        ours = gradient_program(sides, setting)(sides.params, pair.adapters, sides.our_batch())
        reference_loss(sides, setting, pair.model, sides.batch()).backward()
        return ours.adapters, pair.model

    def pairs(sides: Sides) -> Iterable[Pair]:
        (ours, model), (ours_kept, model_kept) = gradients(sides), gradients(kept(sides))
        for what, found, expected in (
            ("recomputed, gradient of", ours, model_kept),
            ("kept, gradient of", ours_kept, model),
        ):
            yield from leaf_pairs(sides, found, expected, what, lambda leaf: leaf.grad)

    return pairs


# ---------------------------------------------------------------- caches


def released(sides: Sides) -> Iterable[Pair]:
    """Caches emptied before every micro-batch, against never: the same bits on either side.

    PyTorch gives its allocator's blocks back, which it has on a GPU alone; JAX forgets what it
    has compiled.
    """
    ours, theirs = OPTIMIZERS["SGD"]

    def reference(between: Callable[[], None]) -> list[Any]:
        return reference_training.first_order(sides, theirs, weigh=True, between=between, **GROUPS)

    def trained(between: Callable[[], None]) -> Any:
        def statistics(params: Any, batch: Any, positions: Any, terms: Any) -> Any:
            return jax.grad(sides.objective)(params, batch), {"terms": terms}

        found = []
        for params, _ in micro_steps(sides, jk.multi_steps(ours(), group_size), statistics):
            between()
            found.append(params)
        return found[-1]

    def forget() -> None:
        gc.collect()
        jax.clear_caches()

    ours_kept, ours_released = trained(lambda: None), trained(forget)
    theirs_kept, theirs_released = reference(lambda: None)[-1], reference(release_cache)[-1]
    for side, one, other in (
        ("jaxkfac", ours_kept, ours_released),
        ("torch_ref", theirs_kept, theirs_released),
    ):
        for (path, x), y in zip(
            jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(other), strict=True
        ):
            yield Pair(jax.tree_util.keystr(path), f"same bits, {side}", np.array_equal(x, y), True)
    yield from tree_pairs(ours_released, theirs_released)


# ---------------------------------------------------------------- bfloat16


def stored(sides: Sides, seed: int) -> dict[str, ref.LayerFactors]:
    """torch_ref's factors in bfloat16, on the documents' scale."""
    return ref.collect_factors(sides.model, sides.loss, sides.batch(seed), keep=torch.bfloat16)


def widened(sides: Sides, factors: dict[str, ref.LayerFactors]) -> dict[str, ref.LayerFactors]:
    """The same numbers in the problem's dtype and on jaxkfac's scale."""
    wide = {
        name: dataclasses.replace(f, a=f.a.to(sides.tensor_dtype), g=f.g.to(sides.tensor_dtype))
        for name, f in factors.items()
    }
    return ref.to_sum_scale(wide, loss_terms=sides.data().loss_terms)


def average_in_bfloat16(sides: Sides, steps: int) -> dict[str, ref.LayerFactors]:
    """torch_ref's debiased average; every product and sum in it is rounded."""
    average = ref.zeros_like(stored(sides, 0))
    for step in range(steps):
        average = ref.update_average(average, stored(sides, step), DECAY)
    assert all(side.dtype == torch.bfloat16 for f in average.values() for side in (f.a, f.g))
    rows = {name: f.rows for name, f in stored(sides, 0).items()}  # of every step
    counted = {name: dataclasses.replace(f, rows=rows[name]) for name, f in average.items()}
    return ref.debias(widened(sides, counted), DECAY, steps)


def in_bfloat16(steps: int) -> Callable[[Sides], Iterable[Pair]]:
    """The average that is stored in bfloat16, against the other side's, rounded and not."""

    def average(sides: Sides, storage: Any) -> jk.Factors:
        with jk.HostCurvature(decay=DECAY, refresh_every=steps, lag=1, storage=storage) as service:
            for step in range(steps):
                service.push(sides.ours(step).factors[JOINT], step)
            return service.average()

    def pairs(sides: Sides) -> Iterable[Pair]:
        ours, whole = average(sides, "bfloat16"), average(sides, "float32")
        theirs = average_in_bfloat16(sides, steps)
        expected = plain_average(sides, DECAY, steps)
        for what, one, other in (
            ("both rounded", ours, theirs),
            ("jaxkfac's rounded", ours, expected),
            ("torch_ref's rounded", whole, theirs),
        ):
            for pair in factor_pairs(sides, one, other):
                yield pair._replace(what=f"{pair.what}, {what}")
        for twin in sides.problem.twins:
            name = sides.name(twin)
            for side in ("a", "g"):
                x, y = getattr(ours[name], side), getattr(whole[name], side)
                yield Pair(name, f"{side} is rounded", np.array_equal(x, y), False)

    return pairs


# A number in bfloat16 is off by at most 2^-8 of itself. One step: jaxkfac rounds its sum,
# torch_ref its factor and the factor's product with 1 - decay. Several steps: each rounds anew,
# jaxkfac once and torch_ref four times, and an error decays with the average.
ROUNDING = 2.0**-8
ONE_STEP = Tolerance(3 * ROUNDING, "stored numbers have 8 bits: three roundings together")
SEVERAL_STEPS = Tolerance(
    4 * ROUNDING,
    "stored numbers have 8 bits: five roundings for each step, independent, at decay 0.8",
)


# ---------------------------------------------------------------- the table

SAME = {
    "float64": Tolerance(1e-12, "the same sums, computed twice"),
    "float32": Tolerance(1e-4, "the same sums, computed twice; some add terms of both signs"),
}

CASES = [
    *cases(
        "recomputation",
        "value, gradient and factors",
        "recomputed blocks",
        recomputed_factors,
        covers=("value_grad_and_factors", "Factors"),
        tolerances=SAME,
    ),
    *(
        case
        for placement in ("output", "bottleneck")
        for case in cases(
            "recomputation",
            f"gradients of adapters, {placement}",
            "recomputed blocks",
            recomputed_adapters(placement),
            covers=("attach", "Adapter"),
            tolerances=SAME,
        )
    ),
    *cases(
        "released caches",
        "K micro-batches as one step",
        "classifier",
        released,
        covers=("multi_steps",),
        tolerances={dtype: exact(times32=2e-5)[dtype] for dtype in ("float64", "float32")},
    ),
    *(
        case
        for name, steps, tolerance in (
            ("factors of one step", 1, ONE_STEP),
            (f"average of {STEPS} steps", STEPS, SEVERAL_STEPS),
        )
        for case in cases(
            "bfloat16 storage",
            name,
            ["classifier", "scanned", "blocks"],
            in_bfloat16(steps),
            covers=("HostCurvature",),
            tolerances={"float64": tolerance, "float32": tolerance},
        )
    ),
]


@pytest.mark.default(1, slow=2)
@over(CASES)
def test_numbers_stay_as_they_are(case, check):
    check(case)
