"""Eigenvalues of every factor as plain records, before and after clipping."""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxkfac.curvature.capacity import diagonal_rows

Side = Literal["A", "G", "diagonal"]


class SpectrumRecord(NamedTuple):
    r"""The spectrum of one factor of one stacked slice.

    Attributes:
        layer: Layer name.
        side: ``"A"`` (inputs), ``"G"`` (output gradients), or ``"diagonal"`` for scales and
            lone biases.
        slice: Index into the layer's stack, ``()`` without one.
        source: Layer under which this factor is stored; another one for a shared input.
        raw: Eigenvalues as decomposed, descending; rounding leaves small negative ones.
        clipped: The same after clipping.
        top: Largest eigenvalue.
        condition_raw: ``top`` over the smallest, or ``None`` where that is not positive.
        condition_clipped: The same after clipping.
        raised: How many eigenvalues clipping has raised.
        entropy_rank: $\exp(-\sum p_i \log p_i)$, $p = \lambda / \sum \lambda$ over the
            positive raw values: 1 for one direction, n for an isotropic factor
            (Roy and Vetterli, The effective rank, 2007).
    """

    layer: str
    side: Side
    slice: tuple[int, ...]
    source: str
    raw: list[float]
    clipped: list[float]
    top: float
    condition_raw: float | None
    condition_clipped: float | None
    raised: int
    entropy_rank: float


def spectrum_records(bases: Any) -> list[SpectrumRecord]:
    """Records of all spectra, in the order of the layers.

    Args:
        bases: What ``jk.eigendecompose`` returns, with or without vectors.
    """
    return [record for layer in bases.layers for record in _of_layer(layer, bases[layer.name])]


def _of_layer(layer: Any, basis: Any) -> Iterator[SpectrumRecord]:
    if layer.is_diagonal:
        raw, clipped = (diagonal_rows(layer, x) for x in (basis.raw_diagonal, basis.diagonal))
        yield from _of_side(layer.name, "diagonal", layer.name, raw, clipped)
        return
    yield from _of_side(layer.name, "A", layer.input, basis.a_raw_values, basis.a_values)
    yield from _of_side(layer.name, "G", layer.name, basis.g_raw_values, basis.g_values)


def _of_side(
    name: str, side: Side, source: str, raw: Any, clipped: Any
) -> Iterator[SpectrumRecord]:
    raw, clipped = (np.asarray(x, np.float64) for x in (raw, clipped))
    for index in np.ndindex(raw.shape[:-1]):
        order = np.argsort(-raw[index], kind="stable")
        before, after = raw[index][order], clipped[index][order]
        yield SpectrumRecord(
            layer=name,
            side=side,
            slice=index,
            source=source,
            raw=before.tolist(),
            clipped=after.tolist(),
            top=float(before[0]),
            condition_raw=_condition(before),
            condition_clipped=_condition(after),
            raised=int((after > before).sum()),
            entropy_rank=_entropy_rank(before),
        )


def _condition(descending: np.ndarray) -> float | None:
    return float(descending[0] / descending[-1]) if descending[-1] > 0 else None


def _entropy_rank(values: np.ndarray) -> float:
    positive = values[values > 0]
    if not len(positive):
        return 0.0
    p = positive / positive.sum()
    return float(np.exp(-(p * np.log(p)).sum()))
