"""Totals from shapes alone, beside those with what XLA allocates for a CPU.

A CPU's compiler fuses less than is counted, so that the bound is wide; for an H100 the record is
``benchmarks/results/plan.md``. Beside frozen weights it keeps half as much again: adapters and NF4
are not compared.
"""

import pytest

from benchmarks.plan import planned_bytes, trainings

TRAININGS = {k: v for k, v in trainings(scale=2) if k not in ("adapters", "NF4")}
QUICK = ("scanned, rematted", "dense", "convolution")


TOO_LOW = pytest.mark.xfail(reason="33 % too low, decompositions and all; why is not known yet")


def _marks(name):
    slow = [] if name in QUICK else [pytest.mark.slow]
    return [*slow, TOO_LOW] if name == "K-FAC in graph" else slow


@pytest.mark.parametrize("name", [pytest.param(x, marks=_marks(x)) for x in TRAININGS])
def test_a_total_from_shapes_is_near_that_with_a_compilers_temporaries(name):
    training = TRAININGS[name]
    planned, asked = (
        planned_bytes(training, training.estimate(compiler=compiler)) for compiler in (None, "cpu")
    )
    assert planned == pytest.approx(asked, rel=0.3)
