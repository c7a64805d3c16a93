"""Powers of the curvature applied to gradients: natural gradient, roots, products."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import pytest

import jaxkfac as jk
from parity_tests.cases import Tolerance, cases, divided, exact, over
from parity_tests.compare import Pair
from parity_tests.problem import Option
from parity_tests.sides import Sides
from torch_ref import curvature as ref

JOINT: Option = ("expand", "joint")
SEPARATE: Option = ("expand", "separate")
REDUCE: Option = ("reduce", "joint")

PAIR = (0.02, 0.3)  # a damping for each factor, in its own units; unequal, so that they cannot swap
POWERS = (-1.0, -0.5, 0.5, 1.0)
CONDITIONS = (10.0, 1e2, 1e4)  # of each factor; of a block their square


def tree_pairs(ours: Any, reference: Any) -> Iterable[Pair]:
    """Leaf by leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(reference)
    for (path, expected), found in zip(leaves, jax.tree.leaves(ours), strict=True):
        yield Pair(jax.tree_util.keystr(path), "leaf", found, expected)


@jax.jit
def _every_power(grads: Any, bases: jk.Eigenbases) -> dict[str, Any]:
    """All powers of one problem in one compiled program."""
    found: dict[Any, Any] = {p: jk.apply_power(grads, bases, p, PAIR) for p in POWERS}
    found["fvp"] = jk.fisher_vector_product(grads, bases)
    return {str(key): value for key, value in found.items()}


@jax.jit
def _natural(grads: Any, bases: jk.Eigenbases) -> Any:
    return jk.natural_gradient(grads, bases, damping=0.0)


def _all(sides: Sides, option: Option) -> dict[str, Any]:
    return sides.kept(
        ("powers", option), lambda: _every_power(sides.ours().grads, sides.our_bases(option))
    )


def power(option: Option, exponent: float) -> Callable[[Sides], Iterable[Pair]]:
    """A damping for each factor."""

    def pairs(sides: Sides) -> Iterable[Pair]:
        applied = ref.apply_power(
            sides.gradients(option[1]), sides.bases(option), exponent, damping=PAIR
        )
        return tree_pairs(_all(sides, option)[str(exponent)], sides.tree(applied))

    return pairs


def product(option: Option) -> Callable[[Sides], Iterable[Pair]]:
    def pairs(sides: Sides) -> Iterable[Pair]:
        applied = ref.fisher_vector_product(sides.gradients(option[1]), sides.bases(option))
        return tree_pairs(_all(sides, option)["fvp"], sides.tree(applied))

    return pairs


def clipped(option: Option, condition: float) -> Callable[[Sides], Iterable[Pair]]:
    """The natural gradient without damping: clipping alone keeps it finite."""

    def pairs(sides: Sides) -> Iterable[Pair]:
        ours = _natural(sides.ours().grads, sides.our_bases(option, condition))
        bases = sides.bases(option, condition)
        return tree_pairs(ours, sides.tree(ref.natural_gradient(sides.gradients(option[1]), bases)))

    return pairs


# ---------------------------------------------------------------- the table

JOINTLY = ["classifier", "conv1d", "conv2d", "masked tokens", "shared", "scanned"]
SEPARATELY = ["classifier", "conv2d", "masked tokens", "scanned"]
REDUCED = ["conv2d", "conv1d"]
# With these dampings the factors' condition numbers are at most 200 and 10.
DAMPED = divided(200, times=2)


def _float64(tolerances: dict[str, Tolerance]) -> dict[str, Tolerance]:
    return {"float64": tolerances["float64"]}


CASES = [
    *(
        case
        for option, names in ((JOINT, JOINTLY), (SEPARATE, SEPARATELY), (REDUCE, REDUCED))
        for exponent in POWERS
        for case in cases(
            "powers",
            f"{exponent:g}, {option[0]}, {option[1]}",
            names,
            power(option, exponent),
            covers="apply_power",
            tolerances=DAMPED if exponent < 0 else exact(),
        )
    ),
    *(
        case
        for option, names in ((JOINT, JOINTLY), (SEPARATE, SEPARATELY))
        for case in cases(
            "Fisher vector product",
            f"{option[0]}, {option[1]}",
            names,
            product(option),
            covers="fisher_vector_product",
            tolerances=exact(),
        )
    ),
    *(
        case
        for condition in CONDITIONS
        for option, names in ((JOINT, JOINTLY), (SEPARATE, SEPARATELY[:2]))
        for case in cases(
            "natural gradient",
            f"condition {condition:g}, {option[1]}",
            names,
            clipped(option, condition),
            covers="natural_gradient",
            # in float32 two correct programs share two digits at 1e4
            tolerances=_float64(divided(condition)) if condition > 1e2 else divided(condition),
        )
    ),
]


@pytest.mark.default(1, slow=2)
@over(CASES)
def test_powers_agree(case, check):
    check(case)
