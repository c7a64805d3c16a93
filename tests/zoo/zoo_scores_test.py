"""Scores of some programs of the zoo: brute force's, or refused with a sentence that says why."""

import jax
import pytest

import jaxkfac as jk
from tests._example_gradients import check_scores
from tests.zoo import all_programs

SCORED = (
    "blocks in scan of remat of jit",
    "recurrence over time",
    "q, k, v concatenated into one product",
    "halves of one kernel, sliced",
)
REFUSED = {
    "lax.map over examples": (jk.LostRowsError, "cannot be told apart by example"),
    "a kernel under a constant mask, and a triangle": (ValueError, "masked by a constant"),
    "weight norm: v / norm(v) * g": (ValueError, "a weight that is computed from others"),
    "residual net with batch statistics": (jk.CoupledExamplesError, "use evaluation mode"),
}


def bases_of(row, case):
    options = ({"uncovered": "ignore"} if row.uncovered else {}) | dict(case.options)
    stats = jax.jit(jk.value_grad_and_factors(case.objective, **options))
    return jk.eigendecompose(stats(case.params, case.batch, **case.call)[2])


@pytest.mark.exhaustive
@pytest.mark.standard_promotion
@pytest.mark.parametrize("name", SCORED)
def test_scores_are_those_of_each_examples_gradient(name, x64):
    row = all_programs()[name]
    case = row.build()
    bases = bases_of(row, case)
    check_scores(case.objective, case.params, case.batch, bases, case.tolerance)


@pytest.mark.slow
@pytest.mark.standard_promotion
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_gradients_of_single_examples_is_refused(name, x64):
    row = all_programs()[name]
    case = row.build()
    bases, (error, words) = bases_of(row, case), REFUSED[name]
    state = {"state": case.call["state"]} if "state" in case.call else {}
    with pytest.raises(error, match=words):
        jk.influence(case.objective, case.params, bases, case.batch, case.batch, **state)
    with pytest.raises(error, match=words):
        jk.self_influence(case.objective, case.params, bases, case.batch, **state)
