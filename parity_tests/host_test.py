"""Curvature on the host: the average of several steps, and the bases that are made of it."""

import dataclasses
from collections.abc import Iterable

import jax
import pytest

import jaxkfac as jk
from parity_tests.averages_test import counted_average, plain_average
from parity_tests.cases import cases, exact, over
from parity_tests.compare import Pair
from parity_tests.decomposition_test import dense
from parity_tests.factors_test import factor_pairs
from parity_tests.powers_test import JOINT
from parity_tests.sides import Sides
from torch_ref.curvature import decompose_factors

STEPS, DECAY, CONDITION = 3, 0.8, 1e2


def on_the_host(sides: Sides) -> Iterable[Pair]:
    """Every step is pushed; the bases of the last one are handed over one step later."""
    counts = {sides.data(step).loss_terms for step in range(STEPS)}
    # ours weighs a step by its counts; where they are equal that is the documents' average
    if len(counts) == 1:
        reference = plain_average(sides, DECAY, STEPS)
    else:
        reference = counted_average(sides, DECAY, range(STEPS))
    with jk.HostCurvature(decay=DECAY, refresh_every=1, lag=1, max_condition=CONDITION) as service:
        for step in range(STEPS):
            service.push(sides.ours(step).factors[JOINT], step)
        ours = service.average()
        rebuilt = jax.jit(jk.reconstruct)(service.bases(STEPS))
    yield from factor_pairs(sides, ours, reference)
    bases = decompose_factors(reference, max_condition=CONDITION, device=sides.device)
    clipped = {
        name: dataclasses.replace(f, a=dense(bases[name].a), g=dense(bases[name].g))
        for name, f in reference.items()
    }
    for pair in factor_pairs(sides, rebuilt, clipped):
        yield pair._replace(what=f"{pair.what} of the bases")


CASES = cases(
    "host curvature",
    "average of three steps, and its bases",
    ["classifier", "scanned", "masked tokens"],
    on_the_host,
    covers=("HostCurvature", "reconstruct"),
    tolerances={
        dtype: exact(why="relative to the largest eigenvalue, which is well conditioned")[dtype]
        for dtype in ("float64", "float32")
    },
)


@pytest.mark.default(1, slow=1)
@over(CASES)
def test_host_curvature_agrees(case, check):
    check(case)
