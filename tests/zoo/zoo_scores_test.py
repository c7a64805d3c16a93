"""Scores of the zoo's programs: brute force's, or refused with a sentence that says why."""

import jax
import pytest

import jaxkfac as jk
from tests._example_gradients import check_scores
from tests.zoo import Program, all_programs

# Name of a row: what is raised, and what its sentence holds.
REFUSED: dict[str, tuple[type[Exception], str]] = {}
ROWS = [pytest.param(row, id=name) for name, row in all_programs().items() if row.available]


@pytest.mark.standard_promotion
@pytest.mark.sampled(8)
@pytest.mark.parametrize("row", ROWS)
def test_scores_are_those_of_each_examples_gradient_or_are_refused(row: Program, x64):
    case = row.build()
    options = ({"uncovered": "ignore"} if row.uncovered else {}) | dict(case.options)
    stats = jax.jit(jk.value_grad_and_factors(case.objective, **options))
    bases = jk.eigendecompose(stats(case.params, case.batch, **case.call)[2])
    call = {"state": case.call["state"]} if "state" in case.call else {}
    call |= {key: options[key] for key in ("experts",) if key in options}
    args = case.objective, case.params, case.batch, bases
    if row.name not in REFUSED:
        check_scores(*args, case.tolerance, **call)
        return
    error, words = REFUSED[row.name]
    with pytest.raises(error, match=words):
        jk.influence(case.objective, case.params, bases, case.batch, case.batch, **call)
