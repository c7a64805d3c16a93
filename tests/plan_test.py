"""The plan's totals are those of the compiled programs of a training."""

import jax
import pytest

from benchmarks.plan import planned_bytes, trainings

TRAININGS = dict(trainings(scale=2))
# Where the plan does not compile the very program that runs; the others are the same program twice.
CHEAP = ("adapters", "NF4", "host", "budget", "accumulation")


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in CHEAP else pytest.mark.slow) for x in TRAININGS]
)
def test_a_total_is_within_five_per_cent_of_what_the_cpu_compiler_allocates(name):
    training = TRAININGS[name]
    planned = planned_bytes(training, training.estimate(compiler="cpu"))
    assert planned == pytest.approx(max(map(allocated, training.parts)), rel=0.05)


@pytest.mark.parametrize("name", TRAININGS)
def test_from_shapes_alone_a_total_is_near(name):
    """XLA fuses less on a CPU than is counted; ``benchmarks/results/plan.md`` has an H100."""
    training = TRAININGS[name]
    planned, asked = (
        planned_bytes(training, training.estimate(compiler=compiler)) for compiler in (None, "cpu")
    )
    assert planned == pytest.approx(asked, rel=0.3)


def allocated(part):
    step = jax.jit(part.fn, donate_argnums=part.donated, keep_unused=True).lower(*part.args)
    found = step.compile().memory_analysis()
    program = found.argument_size_in_bytes + found.temp_size_in_bytes + found.output_size_in_bytes
    return program - found.alias_size_in_bytes + part.beside
