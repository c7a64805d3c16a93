"""One damping for both factors in each of its modes, and the cut of a pseudo-inverse."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import pytest
import torch

import jaxkfac as jk
from parity_tests.cases import cases, divided, over
from parity_tests.compare import Pair
from parity_tests.powers_test import tree_pairs
from parity_tests.problem import Option
from parity_tests.sides import Sides
from torch_ref import curvature as ref
from torch_ref.factors import LayerGradient

JOINT: Option = ("expand", "joint")
DAMPING, CUT = 0.1, 1e-2


@jax.jit
def _modes(grads: Any, bases: jk.Eigenbases) -> dict[str, Any]:
    """Everything of one problem in one compiled program."""
    modes = ("exact", "factored", "pi")
    found = {mode: jk.apply_power(grads, bases, -0.5, DAMPING, mode) for mode in modes}
    return found | {"cut": jk.apply_power(grads, bases, -1.0, cut=CUT)}


def _every_mode(sides: Sides) -> dict[str, Any]:
    return sides.kept("modes", lambda: _modes(sides.ours().grads, sides.our_bases(JOINT)))


def _block(basis: ref.LayerBasis, name: str) -> tuple[ref.KroneckerOperator, torch.Tensor]:
    """A layer's A x G as an operator, and as a matrix column by column."""
    operator = ref.KroneckerOperator({name: basis})
    eye = torch.eye(operator.shape[0], dtype=basis.g.values.dtype)
    return operator, torch.stack([operator @ column for column in eye], dim=1)


def _densely(sides: Sides, function: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    """``function`` of each layer's dense block, times its gradient."""
    applied = {}
    for name, basis in sides.bases(JOINT).items():
        operator, matrix = _block(basis, name)
        gradient = {name: LayerGradient(sides.gradients()[name].weight.cpu())}
        groups = math.prod(basis.g.values.shape[:-1])
        vector = operator.flatten(gradient)
        if groups == 1:
            result = function(matrix) @ vector
        else:  # a group is a block of its own
            size = len(vector) // groups
            cuts = [slice(i * size, (i + 1) * size) for i in range(groups)]
            result = torch.cat([function(matrix[c, c]) @ vector[c] for c in cuts])
        applied |= operator.unflatten(result)
    return sides.tree(applied)


def exactly_damped(sides: Sides) -> Iterable[Pair]:
    """One damping, added to the eigenvalues of the whole block."""

    def root(matrix: torch.Tensor) -> torch.Tensor:
        values, vectors = torch.linalg.eigh(matrix)
        return (vectors * (values.clamp(min=0) + DAMPING) ** -0.5) @ vectors.mT

    return tree_pairs(_every_mode(sides)["exact"], _densely(sides, root))


def pseudo_inverse(sides: Sides) -> Iterable[Pair]:
    """Directions below the cut left out."""

    def inverse(matrix: torch.Tensor) -> torch.Tensor:
        return torch.linalg.pinv(matrix, rtol=CUT, hermitian=True)

    return tree_pairs(_every_mode(sides)["cut"], _densely(sides, inverse))


def split(mode: str) -> Callable[[Sides], Iterable[Pair]]:
    """One damping spread over both factors, as a pair for each layer (and each group)."""

    def pairs(sides: Sides) -> Iterable[Pair]:
        applied = {}
        for name, basis in sides.bases(JOINT).items():
            means = [s.raw_values.double().mean(-1) for s in (basis.a, basis.g)]
            pi = (means[0] / means[1]).sqrt() if mode == "pi" else torch.tensor(1.0)
            root = DAMPING**0.5
            gradient = sides.gradients()[name].weight
            parts = []
            for i in range(pi.numel()):
                one = _group(basis, i) if pi.ndim else basis
                weight = gradient[i] if pi.ndim else gradient
                damping = root * float(pi.reshape(-1)[i]), root / float(pi.reshape(-1)[i])
                got = ref.apply_power(
                    {name: LayerGradient(weight)}, {name: one}, -0.5, damping=damping
                )
                parts.append(got[name].weight)
            applied[name] = LayerGradient(torch.stack(parts) if pi.ndim else parts[0])
        return tree_pairs(_every_mode(sides)[mode], sides.tree(applied))

    return pairs


def _group(basis: ref.LayerBasis, index: int) -> ref.LayerBasis:
    spectra = [type(s)(*(x[index] for x in s)) for s in (basis.a, basis.g)]
    return ref.LayerBasis(*spectra, basis.bias)


# The factors' condition numbers are at most 200 and 10 with this damping.
DAMPED = divided(200, times=2)

CASES = [
    *(
        case
        for name, pairs in (
            ("exact", exactly_damped),
            ("factored", split("factored")),
            ("pi", split("pi")),
        )
        for case in cases(
            "damping modes",
            f"{name}, power -1/2",
            ["classifier", "conv2d", "scanned"],
            pairs,
            covers="apply_power",
            tolerances=DAMPED,
        )
    ),
    *cases(
        "damping modes",
        "cut of a pseudo-inverse",
        ["classifier", "conv2d"],
        pseudo_inverse,
        covers="apply_power",
        tolerances=divided(1 / CUT, times=2),
    ),
]


@pytest.mark.default(1, slow=1)
@over(CASES)
def test_dampings_agree(case, check):
    check(case)
