"""Capacity metrics by layer and of the whole model, on both scales."""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import jaxkfac as jk
from parity_tests.cases import cases, divided, exact, over
from parity_tests.compare import Pair
from parity_tests.problem import Option
from parity_tests.sides import Sides
from torch_ref import curvature as ref
from torch_ref.linalg import Spectrum

JOINT: Option = ("expand", "joint")
SEPARATE: Option = ("expand", "separate")
NUM_EXAMPLES, DAMPING, THRESHOLD = 1000, 0.5, 1e-3


def _ours(sides: Sides, option: Option, seed: int = 0) -> jk.CapacityMetrics:
    return jk.capacity_metrics(
        sides.our_bases(option, seed=seed),
        num_examples=NUM_EXAMPLES,
        damping=DAMPING,
        threshold=THRESHOLD,
    )


def _theirs(bases: Any, damping: float = DAMPING / NUM_EXAMPLES) -> ref.ModelCapacity:
    """torch_ref adds its damping to the eigenvalue, jaxkfac to N times it."""
    return ref.capacity_metrics(
        bases, num_examples=NUM_EXAMPLES, damping=damping, threshold=THRESHOLD
    )


def _parts(record: Any) -> list[Any]:
    return list(record.slices) or [record]


def sums(option: Option) -> Callable[[Sides], Iterable[Pair]]:
    """What is a sum over eigenvalues: traces, ranks, counts, damped logarithms."""

    def pairs(sides: Sides) -> Iterable[Pair]:
        ours, theirs = _ours(sides, option), _theirs(sides.bases(option))
        for twin in sides.problem.twins:
            for part, module in zip(_parts(ours[twin.name]), twin.modules, strict=False):
                whole = ours[twin.name] if len(twin.modules) == 1 else part
                expected = theirs.layers[module]
                yield from _sums(f"{twin.name} {module}", whole, expected)
        yield from _sums("model", ours.model, theirs)
        ranks = ours.over_layers.mean_participation_ratio
        if all(len(_parts(r)) == len(t.modules) for r, t in _with_twins(sides, ours)):
            yield Pair("model", "mean effective rank", ranks, theirs.mean_effective_rank)

    return pairs


def _with_twins(sides: Sides, ours: jk.CapacityMetrics) -> list[tuple[Any, Any]]:
    return [(ours[twin.name], twin) for twin in sides.problem.twins]


def _sums(name: str, ours: Any, theirs: Any) -> Iterable[Pair]:
    yield Pair(name, "dimension", ours.dimension, theirs.dimension)
    yield Pair(name, "trace", ours.trace, theirs.trace)
    yield Pair(name, "num_above", ours.num_above, theirs.num_above)
    yield Pair(name, "PAC-Bayes", ours.pac_bayes_complexity, theirs.pac_bayes_complexity)
    shift = ours.dimension * math.log(NUM_EXAMPLES)
    damped = ours.log_determinant_damped - shift
    yield Pair(name, "log determinant, damped", damped, theirs.log_determinant)
    if hasattr(theirs, "effective_rank"):
        yield Pair(name, "effective rank", ours.participation_ratio, theirs.effective_rank)
        yield Pair(name, "num_above_a", ours.num_above_a, theirs.num_above_a)
        yield Pair(name, "num_above_g", ours.num_above_g, theirs.num_above_g)


def extremes(sides: Sides) -> Iterable[Pair]:
    """What the smallest eigenvalue decides, of a model none of whose blocks is singular."""
    ours, theirs = _ours(sides, JOINT), _theirs(sides.bases(JOINT), damping=0.0)
    for twin in sides.problem.twins:
        record, expected = ours[twin.name], theirs.layers[twin.modules[0]]
        yield Pair(twin.name, "condition", record.condition, expected.condition_number)
        yield Pair(twin.name, "ln det", record.log_determinant, expected.log_determinant)
    largest = ours.over_layers.largest_condition
    yield Pair("model", "largest condition", largest, theirs.largest_condition_number)
    yield Pair("model", "ln det", ours.model.log_determinant, theirs.log_determinant)


def documented(sides: Sides) -> Iterable[Pair]:
    """On the documents' scale every eigenvalue of G is ours over rows and terms."""
    theirs = _theirs(ref.decompose_factors(sides.factors(JOINT)))
    ours, terms = _ours(sides, JOINT), sides.data().loss_terms
    for twin in sides.problem.twins:
        rows = sides.factors(JOINT)[twin.modules[0]].rows
        expected, record = theirs.layers[twin.modules[0]], ours[twin.name]
        yield Pair(twin.name, "trace / (rows terms)", record.trace / (rows * terms), expected.trace)
        ranks = record.participation_ratio, expected.effective_rank
        yield Pair(twin.name, "effective rank, without a scale", *ranks)


def compared(sides: Sides) -> Iterable[Pair]:
    """The change from one batch to another."""
    found = jk.compare_capacity(*(_ours(sides, JOINT, seed) for seed in (0, 1)))
    before, after = (_theirs(sides.bases(JOINT, seed=seed)) for seed in (0, 1))
    for twin in sides.problem.twins:
        old, new = (x.layers[twin.modules[0]] for x in (before, after))
        change = found.layers[twin.name]["trace"]
        yield Pair(twin.name, "trace ratio", change.ratio, new.trace / old.trace)
        yield Pair(twin.name, "trace before and after", change[:2], [old.trace, new.trace])
    changes = found.model["pac_bayes_complexity"]
    values = before.pac_bayes_complexity, after.pac_bayes_complexity
    yield Pair("model", "PAC-Bayes before and after", changes[:2], values)


def interval(sides: Sides) -> Iterable[Pair]:
    """Student's interval of the reference's metrics over three batches."""
    found = jk.capacity_interval([_ours(sides, JOINT, seed) for seed in range(3)])
    theirs = [_theirs(sides.bases(JOINT, seed=seed)) for seed in range(3)]
    for twin in sides.problem.twins:
        values = np.array([t.layers[twin.modules[0]].trace for t in theirs])
        low, high = stats.t.interval(0.95, 2, values.mean(), stats.sem(values))
        expected = values.mean(), low, high
        yield Pair(twin.name, "trace", found.layers[twin.name]["trace"], expected)


def from_outside(sides: Sides) -> Iterable[Pair]:
    """Eigenvalues given from outside, of every size: 1e-12 and below the threshold too."""
    rng = np.random.default_rng(41)
    bases = sides.our_bases(JOINT)
    values = {n: 10.0 ** rng.uniform(-12, 1, size=b.values.shape) for n, b in bases.g.items()}
    given = {n: s._replace(values=jnp.asarray(values[n], sides.dtype)) for n, s in bases.g.items()}
    ours = jk.capacity_metrics(
        dataclasses.replace(bases, g=given),
        num_examples=NUM_EXAMPLES,
        damping=DAMPING,
        threshold=THRESHOLD,
    )
    theirs = {}
    for twin in sides.problem.twins:
        old, tensor = sides.bases(JOINT)[twin.modules[0]], sides.tensor(values[twin.name]).cpu()
        theirs[twin.modules[0]] = old._replace(g=Spectrum(tensor, tensor, old.g.vectors))
    reference = _theirs(theirs)
    for twin in sides.problem.twins:
        yield from _sums(twin.name, ours[twin.name], reference.layers[twin.modules[0]])


WELL = exact(times32=1e-4, why="sums over eigenvalues, each with the rounding of the largest")
CPU = {name: WELL[name] for name in ("float64", "float32")}

CASES = [
    *(
        case
        for option, names in (
            (JOINT, ["classifier", "regression", "binary", "shared", "scanned"]),
            (SEPARATE, ["classifier", "regression", "scanned"]),
        )
        for case in cases(
            "capacity",
            f"sums, {option[1]} bias",
            names,
            sums(option),
            covers=("capacity_metrics", "CapacityMetrics", "CapacityRecord", "OverLayers"),
            tolerances=CPU,
        )
    ),
    *cases(
        "capacity",
        "condition and determinant",
        ["regression", "binary"],
        extremes,
        covers="capacity_metrics",
        tolerances=divided(1e3),
    ),
    *cases("capacity", "documented scale", ["regression"], documented, tolerances=CPU),
    *cases(
        "capacity",
        "eigenvalues from outside",
        ["regression"],
        from_outside,
        covers="capacity_metrics",
        tolerances=CPU,
    ),
    *cases(
        "capacity",
        "two batches compared",
        "regression",
        compared,
        covers=("compare_capacity", "CapacityComparison", "Change"),
        tolerances=CPU,
    ),
    *cases(
        "capacity",
        "interval over three batches",
        "regression",
        interval,
        covers=("capacity_interval", "CapacityInterval", "Interval"),
        tolerances=CPU,
    ),
]


@pytest.mark.default(1, slow=1)
@over(CASES)
def test_capacity_agrees(case, check):
    check(case)
