"""Totals of the plan, beside those with what XLA allocates for a CPU.

For an H100 the record is ``benchmarks/results/plan.md``.
"""

import pytest

from benchmarks.plan import planned_bytes, trainings
from jaxkfac.planning._temporaries import within

# Adam adds a Python number to an integer.
pytestmark = pytest.mark.standard_promotion

TRAININGS = dict(trainings(scale=2))
QUICK = ("scanned, rematted", "dense", "K-FAC in graph")


def names(quick):
    return [pytest.param(x, marks=[] if x in quick else [pytest.mark.slow]) for x in TRAININGS]


@pytest.mark.parametrize("name", names(QUICK))
def test_a_total_is_what_the_trainings_own_programs_allocate(name):
    training = TRAININGS[name]
    planned = planned_bytes(training, training.estimate(compiled="all"))
    assert planned == pytest.approx(training.compiled("cpu"), rel=0.05)


@pytest.mark.parametrize("name", names(QUICK[:1]))
def test_a_total_from_equations_is_within_what_the_table_says(name):
    training = TRAININGS[name]
    counted, compiled = (
        planned_bytes(training, training.estimate(compiled=sets)) for sets in ("none", "all")
    )
    assert counted == pytest.approx(compiled, rel=within("cpu", calibrated=False))
