"""The extreme eigenvalues of the Kronecker curvature, by Lanczos on both sides."""

from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import pytest

import jaxkfac as jk
from parity_tests.cases import Tolerance, cases, exact, over
from parity_tests.compare import Pair
from parity_tests.problem import Option
from parity_tests.sides import Sides
from torch_ref import curvature as ref

JOINT: Option = ("expand", "joint")
SEPARATE: Option = ("expand", "separate")
PAIR = (0.02, 0.3)
STEPS = 30


def extremes(option: Option, power: float) -> Callable[[Sides], Iterable[Pair]]:
    """Largest and smallest eigenvalue, damped so that the smallest is no rounding."""

    def pairs(sides: Sides) -> Iterable[Pair]:
        ours = jk.operators.kronecker(
            sides.our_bases(option), sides.params, power=power, damping=PAIR
        )
        theirs = ref.KroneckerOperator(sides.bases(option), power=power, damping=PAIR)
        yield Pair("operator", "size", ours.size, theirs.shape[0])
        # as many steps as there are dimensions: both ends are then exact to rounding
        expected = ref.lanczos(theirs, theirs.shape[0], dtype=sides.tensor_dtype)
        found = jk.spectrum(
            ours, ours.size, key=jax.random.key(0), num_steps=ours.size, which="largest"
        )
        # Rounding is relative to the largest eigenvalue, in the smallest one too.
        yield Pair(
            "operator",
            "both ends",
            jnp.stack([found.eigenvalues[0], found.eigenvalues[-1]]),
            expected[[-1, 0]],
        )
        if sides.dtype == "float64":
            yield Pair("operator", "smallest", found.eigenvalues[-1], expected[0])

    return pairs


def largest(sides: Sides) -> Iterable[Pair]:
    """Far fewer steps than dimensions, from different starting vectors."""
    ours = jk.operators.kronecker(sides.our_bases(), sides.params)
    theirs = ref.KroneckerOperator(sides.bases())
    found = jk.spectrum(ours, 1, key=jax.random.key(1), num_steps=STEPS)
    yield Pair("operator", "largest", found.eigenvalues[0], ref.lanczos(theirs, STEPS, seed=2)[-1])


_EXACT = exact(why="as many steps as dimensions, reorthogonalised")
FULL = {name: _EXACT[name] for name in ("float64", "float32")}
FEW = {"float64": Tolerance(1e-6, "30 steps, each side from a vector of its own")}

CASES = [
    *(
        case
        for option, power in ((JOINT, 1.0), (SEPARATE, 1.0), (JOINT, -0.5))
        for case in cases(
            "Lanczos",
            f"both ends, power {power:g}, {option[1]} bias",
            ["classifier", "shared"],
            extremes(option, power),
            covers=("spectrum", "operators", "kronecker", "OperatorSpectrum", "KroneckerOperator"),
            tolerances=FULL,
        )
    ),
    *cases("Lanczos", "few steps", ["classifier"], largest, covers="spectrum", tolerances=FEW),
]


@pytest.mark.default(1, slow=1)
@over(CASES)
def test_extremes_agree(case, check):
    check(case)
