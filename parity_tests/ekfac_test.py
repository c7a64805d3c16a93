"""Measured eigenvalues: per-example gradients turned one by one, against one backward pass."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jaxkfac as jk
from parity_tests.cases import cases, divided, exact, over
from parity_tests.compare import Pair
from parity_tests.powers_test import tree_pairs
from parity_tests.problem import Option
from parity_tests.sides import Sides
from torch_ref import curvature as ref
from torch_ref.linalg import Spectrum

DAMPING = 0.1
COVERS = ("correct_eigenvalues", "EigenvalueCorrector")


def examples(sides: Sides, seed: int = 0, targets: Any = None) -> Iterator[tuple[Any, int]]:
    """One example after the other, with its number of loss terms."""
    inputs, given, *mask = sides.batch(seed)
    targets = given if targets is None else targets
    axes = sides.data(seed).terms_axes
    for i in range(len(targets)):
        one = slice(i, i + 1)
        here = {k: x[one] for k, x in inputs.items()} if isinstance(inputs, dict) else inputs[one]
        terms = int(mask[0][one].sum()) if mask else int(np.prod(targets.shape[1:axes]))
        yield (here, targets[one], *(m[one] for m in mask)), terms


def _in_our_basis(sides: Sides, option: Option) -> dict[str, ref.LayerBasis]:
    """torch_ref's bases with jaxkfac's eigenvectors: the measured values then are comparable."""
    ours, found = sides.our_bases(option), {}
    for twin in sides.problem.twins:
        basis = ours[twin.name]
        for i, module in enumerate(twin.modules):

            def spectrum(values: Any, vectors: Any, i=i, twin=twin) -> Spectrum:
                at = (i,) if len(twin.modules) > 1 else ()
                values = torch.from_numpy(np.array(values)[at])
                vectors = None if vectors is None else torch.from_numpy(np.array(vectors)[at])
                return Spectrum(values, values, vectors)

            a, g = (
                spectrum(getattr(basis, f"{side}_values"), getattr(basis, f"{side}_vectors"))
                for side in "ag"
            )
            if twin.kind == "conv":  # rows of the vectors in PyTorch's order
                rows = np.argsort(twin.to_inputs(np.arange(a.size, dtype=float), axes=1))
                assert a.vectors is not None
                a = a._replace(vectors=a.vectors[..., rows, :])
            found[module] = ref.LayerBasis(a, g, sides.bases(option)[module].bias)
    return found


def _ours(sides: Sides, option: Option) -> jk.Eigenbases:
    return sides.kept(
        ("corrected", option),
        lambda: _corrected(sides.objective, sides.our_bases(option), "empirical")(
            sides.params, sides.our_batch(), positions=sides.our_positions()
        ),
    )


def _corrected(objective: Any, bases: jk.Eigenbases, fisher: Any) -> Any:
    return jax.jit(jk.correct_eigenvalues(objective, bases, fisher=fisher))


def _theirs(sides: Sides, bases: Any, targets: Any = None) -> dict[str, ref.MeasuredValues]:
    found = ref.measure_eigenvalues(
        sides.model, sides.loss, examples(sides, targets=targets), bases
    )
    return found


def _value_pairs(sides: Sides, ours: jk.Eigenbases, theirs: Any) -> Iterable[Pair]:
    for twin in sides.problem.twins:
        basis = ours[twin.name]
        expected = twin.stacked(theirs, lambda m: m.weight.mT.numpy())
        yield Pair(twin.name, "values", basis.raw_values, expected)
        if basis.bias_raw_values is not None:
            expected = twin.stacked(theirs, lambda m: m.bias.numpy())
            yield Pair(twin.name, "values of the bias", basis.bias_raw_values, expected)


def values(option: Option) -> Callable[[Sides], Iterable[Pair]]:
    """Both measure in jaxkfac's basis."""

    def pairs(sides: Sides) -> Iterable[Pair]:
        theirs = _theirs(sides, _in_our_basis(sides, option))
        return _value_pairs(sides, _ours(sides, option), theirs)

    return pairs


def with_labels(sides: Sides) -> Iterable[Pair]:
    """Labels from PyTorch on both sides."""
    option: Option = ("expand", "joint")
    ours = _corrected(sides.objective, sides.our_bases(option), "mc")(
        sides.params,
        sides.our_batch(),
        positions=sides.our_positions(),
        labels=jnp.asarray(sides.labels()),
    )
    bases = _in_our_basis(sides, option)
    parts = [_theirs(sides, bases, torch.from_numpy(y).to(sides.device)) for y in sides.labels()]
    mean = {
        name: ref.MeasuredValues(sum(p[name].weight for p in parts) / len(parts))
        for name in parts[0]
    }
    return _value_pairs(sides, ours, mean)


def power(option: Option, exponent: float) -> Callable[[Sides], Iterable[Pair]]:
    """Each side in its own basis: what the basis is must not matter."""

    def pairs(sides: Sides) -> Iterable[Pair]:
        ours = jax.jit(jk.apply_power, static_argnames="power")(
            sides.ours().grads,
            dataclasses.replace(_ours(sides, option), max_condition=float("inf")),
            power=exponent,
            damping=DAMPING,
        )
        bases = sides.bases(option)
        gradients = {
            n: type(g)(*(None if x is None else x.cpu() for x in g))
            for n, g in sides.gradients(option[1]).items()
        }
        measured = _theirs(sides, bases)
        applied = ref.apply_measured_power(gradients, bases, measured, exponent, damping=DAMPING)
        return tree_pairs(ours, sides.tree(applied))

    return pairs


JOINT: Option = ("expand", "joint")
SEPARATE: Option = ("expand", "separate")
# With so many rows that no factor has a repeated eigenvalue, zero included.
OWN = ["regression", "binary", "scanned"]

CASES = [
    *(
        case
        for option, names in (
            (JOINT, ["classifier", "conv1d", "conv2d", "masked tokens", "scanned", "shared"]),
            (SEPARATE, ["classifier", "masked tokens"]),
        )
        for case in cases(
            "EKFAC",
            f"values in one basis, {option[1]} bias",
            names,
            values(option),
            covers=COVERS,
            tolerances=exact(times32=3e-5, why="squares of sums, in a basis of float32 vectors"),
        )
    ),
    *cases(
        "EKFAC",
        "sampled labels",
        ["classifier", "conv1d"],
        with_labels,
        covers=COVERS,
        tolerances={"float64": exact()["float64"]},
    ),
    *(
        case
        for exponent in (-1.0, 0.5)
        for case in cases(
            "EKFAC",
            f"power {exponent:g}, each in its own basis",
            OWN,
            power(JOINT, exponent),
            covers=(*COVERS, "apply_power"),
            tolerances=divided(1e2),
        )
    ),
]


@pytest.mark.default(1, slow=1)
@over(CASES)
def test_measured_eigenvalues_agree(case, check):
    check(case)
