"""Factors of several batches: added, and averaged over steps."""

import dataclasses
from collections.abc import Iterable

import jax
import pytest

import jaxkfac as jk
from parity_tests.cases import cases, exact, over
from parity_tests.compare import Pair
from parity_tests.factors_test import factor_pairs
from parity_tests.sides import Sides
from torch_ref import factors as ref


def pooled(sides: Sides) -> Iterable[Pair]:
    """Sums and counts of two batches added, against the factors of both at once."""
    parts = [sides.factors(seed=s) for s in (0, 1)]
    terms = [sides.data(s).loss_terms for s in (0, 1)]
    reference = ref.to_sum_scale(ref.pool_factors(parts, loss_terms=terms), loss_terms=sum(terms))
    ours = [sides.ours(s).factors["expand", "joint"] for s in (0, 1)]
    return factor_pairs(sides, ours[0] + ours[1], reference)


def plain_average(sides: Sides, decay: float, steps: int) -> dict[str, ref.LayerFactors]:
    """torch_ref's, which starts from zeros and is debiased."""
    average = ref.zeros_like(sides.sum_factors())
    for step in range(steps):
        average = ref.update_average(average, sides.sum_factors(seed=step), decay)
    return ref.debias(average, decay, steps)


def counted_average(
    sides: Sides, decay: float, steps: Iterable[int]
) -> dict[str, ref.LayerFactors]:
    """torch_ref's sums over its counts: a step weighs as many rows (and terms) as it has."""
    sums = ref.zeros_like(sides.sum_factors())
    rows, terms = dict.fromkeys(sums, 0.0), 0.0
    for step in steps:
        new, count = sides.sum_factors(seed=step), sides.data(step).loss_terms
        scaled = {n: dataclasses.replace(f, a=f.a * f.rows, g=f.g * count) for n, f in new.items()}
        sums = ref.update_average(sums, scaled, decay)
        rows = {n: decay * rows[n] + (1 - decay) * f.rows for n, f in new.items()}
        terms = decay * terms + (1 - decay) * count
    return {n: dataclasses.replace(f, a=f.a / rows[n], g=f.g / terms) for n, f in sums.items()}


def _our_average(sides: Sides, decay: float) -> jk.Factors:
    """Of three steps."""
    ours = sides.ours().factors["expand", "joint"]
    for step in (1, 2):
        ours = jk.update_average(ours, sides.ours(step).factors["expand", "joint"], decay)
    return ours


def averaged(sides: Sides) -> Iterable[Pair]:
    """Three steps of an average; ours needs no debiasing, torch_ref's starts from zeros."""
    return factor_pairs(sides, _our_average(sides, 0.9), plain_average(sides, 0.9, 3))


def averaged_by_count(sides: Sides) -> Iterable[Pair]:
    """Batches of unequal masks; torch_ref averages each step alike."""
    return factor_pairs(sides, _our_average(sides, 0.7), counted_average(sides, 0.7, range(3)))


def averaged_at_some_steps(sides: Sides) -> Iterable[Pair]:
    """Factors of every second step; counts of nothing between them leave the average alone."""
    collect = jax.jit(jk.value_grad_and_factors(sides.objective, every=2))
    found = None
    for step in range(4):
        positions = sides.our_positions(step)
        batch = sides.our_batch(step)
        new = collect(sides.params, batch, positions=positions, step=step).factors
        found = new if found is None else jk.update_average(found, new, 0.7)
    assert found is not None
    return factor_pairs(sides, found, counted_average(sides, 0.7, (0, 2)))


CASES = [
    *cases(
        "averages",
        "two batches as one",
        ["classifier", "conv2d", "masked tokens"],
        pooled,
        tolerances=exact(),
    ),
    *cases(
        "averages",
        "three steps",
        ["classifier", "conv1d", "scanned", "wide patches"],
        averaged,
        covers="update_average",
        tolerances=exact(),
    ),
    *cases(
        "averages",
        "three steps of unequal counts",
        "masked tokens",
        averaged_by_count,
        covers="update_average",
        tolerances=exact(),
    ),
    *cases(
        "averages",
        "every second of four steps",
        ["classifier", "masked tokens"],
        averaged_at_some_steps,
        covers="update_average",
        tolerances=exact(),
    ),
]


@pytest.mark.default(1, slow=1)
@over(CASES)
def test_averages_agree(case, check):
    check(case)
