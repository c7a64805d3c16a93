"""Clipped decompositions: rebuilt matrices and spectra, never eigenvectors.

Eigenvectors have no sign, and none at all where an eigenvalue is repeated.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkfac as jk
from jaxkfac.linalg import spectral
from parity_tests.cases import cases, exact, over
from parity_tests.compare import Pair
from parity_tests.factors_test import factor_pairs
from parity_tests.models import PROBLEMS as EVERY_PROBLEM
from parity_tests.problem import Option
from parity_tests.sides import Sides
from torch_ref.linalg import decompose, rebuild

JOINT: Option = ("expand", "joint")
SEPARATE: Option = ("expand", "separate")
REDUCE: Option = ("reduce", "joint")
COVERS = ("eigendecompose", "Eigenbases", "KroneckerEigenbasis", "reconstruct")


def dense(spectrum: Any) -> Any:
    """The matrix of a spectrum of torch_ref, or its diagonal."""
    return spectrum.values if spectrum.vectors is None else rebuild(*spectrum[::2])


def rebuilt(option: Option, condition: float, floor: float) -> Callable[[Sides], Iterable[Pair]]:
    def pairs(sides: Sides) -> Iterable[Pair]:
        ours = jax.jit(jk.reconstruct)(sides.our_bases(option, condition, floor))
        bases, factors = sides.bases(option, condition, floor), sides.sum_factors(option)
        clipped = {
            name: dataclasses.replace(f, a=dense(bases[name].a), g=dense(bases[name].g))
            for name, f in factors.items()
        }
        return factor_pairs(sides, ours, clipped, option)

    return pairs


def spectra(option: Option, condition: float, floor: float) -> Callable[[Sides], Iterable[Pair]]:
    """Clipped and raw eigenvalues; those of a diagonal in their own order."""

    def pairs(sides: Sides) -> Iterable[Pair]:
        ours = sides.our_bases(option, condition, floor)
        theirs = sides.bases(option, condition, floor)
        for twin, letter in sides.problem.sides_to_compare(option):
            basis, side = ours[sides.name(twin)], letter.lower()
            for kind in ("values", "raw_values"):
                expected = twin.stacked(
                    theirs, lambda b, s=side, k=kind: getattr(getattr(b, s), k).numpy()
                )
                found = np.asarray(getattr(basis, f"{side}_{kind}"))
                # torch_ref sets rounding below zero to zero when it decomposes
                found = np.maximum(found, 0) if kind == "raw_values" else found
                yield Pair(twin.name, f"{letter} {kind}", found, expected)

    return pairs


def on_the_host(sides: Sides) -> Iterable[Pair]:
    """Another placement, and values without vectors."""
    factors, theirs = sides.ours().factors[JOINT], sides.bases(JOINT, 1e6)
    host = jk.eigendecompose(factors, placement="host")
    values = jk.eigendecompose(factors, vectors=False)
    for twin in sides.problem.twins:
        for side in ("a", "g"):
            expected = twin.stacked(theirs, lambda b, s=side: getattr(b, s).values.numpy())
            for ours in (host, values):
                yield Pair(twin.name, side, getattr(ours[twin.name], f"{side}_values"), expected)


# ---------------------------------------------------------------- one matrix


@functools.cache
def _matrix() -> np.ndarray:
    """Eigenvalues from 1e-9 to 10, one repeated and one zero."""
    rng = np.random.default_rng(31)
    q, _ = np.linalg.qr(rng.normal(size=(7, 7)))
    return (q * np.array([0.0, 1e-9, 1e-4, 0.5, 0.5, 2.0, 10.0])) @ q.T


def one_matrix(sides: Sides) -> Iterable[Pair]:
    for condition, floor in ((1e2, 0.0), (1e4, 0.0), (1e6, 1e-3), (1.0, 0.0)):
        ours = jax.jit(spectral.eigh_clipped, static_argnames=("max_condition", "floor"))(
            jnp.asarray(_matrix(), sides.dtype), max_condition=condition, floor=floor
        )
        spectrum = decompose(
            sides.tensor(_matrix()), max_condition=condition, damping=floor, device=sides.device
        )
        where = f"condition {condition:g}, floor {floor:g}"
        yield Pair(where, "values", ours.values, spectrum.values)
        found = spectral.from_spectrum(ours.values, ours.vectors)
        yield Pair(where, "matrix", found, dense(spectrum))
        host = spectral.eigh_on_host(_matrix().astype(sides.dtype), name="matrix", vectors=True)
        clipped = spectral.clip_eigenvalues(jnp.asarray(host.values), condition, floor)
        found = spectral.from_spectrum(clipped, jnp.asarray(host.vectors))
        yield Pair(where, "matrix on the host", found, dense(spectrum))


PROBLEMS = ["classifier", "conv1d", "conv2d", "masked tokens", "shared", "scanned", "tied"]
MODES = [(JOINT, 1e2, 0.0), (JOINT, 1e6, 1e-3), (SEPARATE, 1e2, 0.0), (REDUCE, 1e2, 0.0)]


def _having(option: Option) -> list[str]:
    return [name for name in PROBLEMS if option in EVERY_PROBLEM[name].options]


CASES = [
    *(
        case
        for option, condition, floor in MODES
        for what, pairs in (("matrices", rebuilt), ("spectra", spectra))
        for case in cases(
            "decomposition",
            f"{what}, {option[0]}, {option[1]}, condition {condition:g}, floor {floor:g}",
            _having(option),
            pairs(option, condition, floor),
            covers=COVERS,
            tolerances=exact(why="relative to the largest eigenvalue, which is well conditioned"),
        )
    ),
    *cases(
        "decomposition",
        "on the host, values alone",
        ["classifier", "scanned"],
        on_the_host,
        covers="eigendecompose",
        tolerances=exact(why="relative to the largest eigenvalue, which is well conditioned"),
    ),
    *cases(
        "decomposition",
        "one matrix",
        "classifier",
        one_matrix,
        covers=(
            "eigh_clipped",
            "ClippedEigh",
            "eigh_on_host",
            "HostSpectrum",
            "clip_eigenvalues",
            "from_spectrum",
        ),
        tolerances={k: v for k, v in exact().items() if k != "tf32"},
    ),
]


@pytest.mark.default(1, slow=3)
@over(CASES)
def test_decompositions_agree(case, check):
    check(case)
