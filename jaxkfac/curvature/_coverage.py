"""Which layer answers for which part of which parameter."""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from jaxkfac.interception import Index, Layer, ParameterMatrix, kind_named, slices


@dataclasses.dataclass(frozen=True)
class Owner:
    """A layer and the parameters it writes.

    Attributes:
        layer: The layer.
        writes_weight: False where another layer answers for the weight.
        writes_bias: Likewise for the bias; False where there is none.
    """

    layer: Layer
    writes_weight: bool
    writes_bias: bool


@functools.lru_cache(maxsize=64)  # it is asked for at every call outside jit
def owners(layers: tuple[Layer, ...]) -> tuple[Owner, ...]:
    """Give each (slice of a) parameter to one layer.

    Where several blocks cover the same parameter (a tied embedding and head, a parameter
    used in two orientations) a dense one goes before an embedding, and among equals the one
    that has the parameter's name: the embedding's rows are mostly zeros, the head sees every row.

    Returns:
        The layers that write anything, least preferred first, so that where a slice and
        its whole parameter are both covered the preferred one is written last.
    """
    mine = (layer for layer in layers if not layer.computed_from)
    ranked = sorted(mine, key=lambda layer: (kind_named(layer.kind).rank, "@" in layer.suffix))
    taken: set[tuple[str, Index]] = set()
    chosen = []
    for layer in ranked:
        weight, bias = (_take(matrix, taken) for matrix in (layer.weight, layer.bias))
        if weight or bias:
            chosen.append(Owner(layer, weight, bias))
    return tuple(reversed(chosen))


def _take(matrix: ParameterMatrix | None, taken: set[tuple[str, Index]]) -> bool:
    if matrix is None or (matrix.path, matrix.index) in taken:
        return False
    taken.add((matrix.path, matrix.index))
    return True


def covered_indices(layers: Sequence[Layer]) -> dict[str, set[Index]]:
    """``{parameter path: indices of the covered slices}``; ``()`` is all of it."""
    indices: dict[str, set[Index]] = {}
    for layer in layers:
        for matrix in (None if layer.computed_from else layer.weight, layer.bias):
            if matrix is not None:
                indices.setdefault(matrix.path, set()).add(matrix.index)
    return indices


def uncovered_mask(shape: tuple[int, ...], indices: set[Index]) -> np.ndarray:
    """True on the elements of a parameter that no slice covers.

    Only as many leading axes as the longest index has are kept: the mask broadcasts
    against the parameter after trailing axes of size 1 are added, as here they are.
    """
    depth = max((len(index) for index in indices), default=0)
    mask = np.ones(shape[:depth], bool)
    for index in indices:
        mask[slices(index)] = False
    return mask.reshape((*shape[:depth], *[1] * (len(shape) - depth)))
