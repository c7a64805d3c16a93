"""Factors of several batches: added, and averaged over steps."""

import dataclasses
from collections.abc import Iterable

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


def averaged(sides: Sides) -> Iterable[Pair]:
    """Three steps of an average; ours needs no debiasing, torch_ref's starts from zeros."""
    ours, steps = sides.ours().factors["expand", "joint"], None
    for step in range(3):
        new = sides.sum_factors(seed=step)
        if step:
            ours = jk.update_average(ours, sides.ours(step).factors["expand", "joint"], 0.9)
        steps = ref.update_average(ref.zeros_like(new) if steps is None else steps, new, 0.9)
    assert steps is not None
    return factor_pairs(sides, ours, ref.debias(steps, 0.9, 3))


def averaged_by_count(sides: Sides) -> Iterable[Pair]:
    """Batches of unequal masks: a step weighs as many rows (and terms) as it has.

    torch_ref averages each step alike; averaged sums over averaged counts are ours.
    """
    ours = sums = None
    rows, terms = dict.fromkeys(sides.factors(), 0.0), 0.0
    for step in range(3):
        new, count = sides.sum_factors(seed=step), sides.data(step).loss_terms
        scaled = {n: dataclasses.replace(f, a=f.a * f.rows, g=f.g * count) for n, f in new.items()}
        old = sides.ours(step).factors["expand", "joint"]
        ours = old if ours is None else jk.update_average(ours, old, 0.7)
        # from zeros, as debias wants it: the first step weighs no more than the others
        sums = ref.update_average(ref.zeros_like(new) if sums is None else sums, scaled, 0.7)
        rows = {n: 0.7 * rows[n] + 0.3 * f.rows for n, f in new.items()}
        terms = 0.7 * terms + 0.3 * count
    assert sums is not None
    reference = {n: dataclasses.replace(f, a=f.a / rows[n], g=f.g / terms) for n, f in sums.items()}
    return factor_pairs(sides, ours, reference)


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
        ["classifier", "conv1d", "scanned"],
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
]


@over(CASES)
def test_averages_agree(case, check):
    check(case)
