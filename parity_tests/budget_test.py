"""Factors under a budget of bytes: several passes, the factors of one."""

from collections.abc import Iterable

import jax.numpy as jnp
import pytest

import jaxkfac as jk
from parity_tests.cases import cases, exact, over
from parity_tests.compare import Pair
from parity_tests.factors_test import factor_pairs
from parity_tests.powers_test import JOINT, tree_pairs
from parity_tests.sides import Sides

SIDE = 160  # elements: room for one side of a layer, or for one iteration of a scan


def in_passes(sides: Sides) -> Iterable[Pair]:
    budget = SIDE * jnp.dtype(sides.dtype).itemsize
    collect = jk.value_grad_and_factors(sides.objective, max_factor_bytes=budget)
    args = {"positions": sides.our_positions()}
    plan = collect.plan(sides.params, sides.our_batch(), **args)
    yield Pair("plan", "more passes than one", len(plan.passes) > 1, True)
    value, grads, factors = collect(sides.params, sides.our_batch(), **args)
    yield Pair("objective", "value", value, sides.value())
    yield from tree_pairs(grads, sides.tree(sides.gradients()))
    yield from factor_pairs(sides, factors, sides.sum_factors(JOINT))


CASES = cases(
    "factors",
    "in several passes under a budget",
    ["scanned", "masked tokens"],
    in_passes,
    covers=("value_grad_and_factors", "BudgetedCollector"),
    tolerances={dtype: exact()[dtype] for dtype in ("float64", "float32")},
)


@pytest.mark.default(1, slow=1)
@over(CASES)
def test_factors_of_passes_agree(case, check):
    check(case)
