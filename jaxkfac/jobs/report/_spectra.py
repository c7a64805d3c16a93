"""Spectra and layers as plain records."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxkfac._text import number
from jaxkfac.curvature.capacity import diagonal_rows
from jaxkfac.jobs.report._layer_table import TableOfLayers

# ---------------- spectra before and after clipping


Side = Literal["A", "G", "diagonal"]


class SpectrumRecord(NamedTuple):
    r"""The spectrum of one factor of one stacked slice.

    Attributes:
        layer: Layer name.
        side: ``"A"`` (inputs), ``"G"`` (output gradients), or ``"diagonal"`` for scales and
            lone biases.
        slice: Index into the layer's stack, ``()`` without one.
        source: Layer that stores this factor; another layer for a shared input.
        raw: Eigenvalues as decomposed, descending; rounding leaves small negative ones.
        clipped: The eigenvalues after clipping.
        top: Largest eigenvalue.
        condition_raw: ``top`` over the smallest, or ``None`` where that is not positive.
        condition_clipped: The condition number after clipping.
        raised: Number of eigenvalues that clipping raised.
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
        bases: Result of ``jk.eigendecompose``, with or without eigenvectors.
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


# ---------------- families: layers that differ only in their depth


# A number as a whole path component, as an index in brackets, or after an underscore.
_NUMBER = re.compile(r"(?:(?<=[/_\[])|^)\d+(?=[/\]]|$)")


SIDE_TEXT: dict[str, str] = {"A": "A", "G": "G", "diagonal": "diag."}
"""Names of the kinds of factors where there is little room."""


class FactorFamily(NamedTuple):
    """One factor at every depth.

    Attributes:
        title: The layer's name without ``/kernel``, with ``*`` for its number if there are
            several; readers of a shared input are listed one after another.
        side: Kind of the factor.
        members: From the first depth to the last.
    """

    title: str
    side: Side
    members: list[SpectrumRecord]


def families(
    records: Sequence[SpectrumRecord], *, shared_once: bool, separate: bool = False
) -> list[FactorFamily]:
    """Group the records over all depths, in the order of the network.

    Args:
        records: Records of all factors.
        shared_once: Show a shared input factor only where it is stored, with the names of all its
            readers.
        separate: Whether layers whose names differ in a number form separate families.
    """
    name_of = str if separate else lambda layer: _NUMBER.sub("*", layer)
    groups: dict[tuple[str, Side], list[SpectrumRecord]] = {}
    readers: dict[str, list[str]] = {}
    for record in records:
        family = name_of(record.layer)
        if record.side == "A":
            names = readers.setdefault(name_of(record.source), [])
            names += [family] if family not in names else []
        if record.source == record.layer or record.side != "A" or not shared_once:
            groups.setdefault((family, record.side), []).append(record)
    result = []
    for (family, side), members in groups.items():
        names = {record.layer for record in members}
        title = family if len(names) > 1 else names.pop()
        if side == "A" and shared_once:
            title = joined([title, *readers[family][1:]])
        result.append(
            FactorFamily(title.removesuffix("/kernel"), side, sorted(members, key=_depth))
        )
    return result


def joined(names: Sequence[str]) -> str:
    """Shorten the readers ``a/q/kernel``, ``a/k/kernel``, ``a/v/kernel`` to ``a/q, k, v``."""
    short = [name.removesuffix("/kernel") for name in names]
    folder, _, first = short[0].rpartition("/")
    last = ", ".join([first, *(name.rpartition("/")[2] for name in short[1:])])
    return f"{folder}/{last}" if folder else last


def ends(values: Iterable[float]) -> tuple[float, float]:
    """Smallest and largest positive value; (1, 1) if there is none."""
    positive = [value for value in values if value > 0]
    return (min(positive), max(positive)) if positive else (1.0, 1.0)


def _depth(record: SpectrumRecord) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(int(n) for n in _NUMBER.findall(record.layer)), record.slice


# ---------------- the layer table as plain rows


class CoverageRow(NamedTuple):
    """A row about one layer, or about one parameter that no layer covers.

    Attributes:
        name: Layer name, or parameter path.
        kind: The value of ``Layer.kind``, or ``"uncovered"``.
        inputs: Size of the input factor without the ones column; ``None`` if uncovered.
        outputs: Size of the output factor; ``None`` if uncovered.
        stack: Shape of the stacked axes.
        shares_input_with: Layer that stores the input factor, if it is another one.
        parameters: Number of elements that the layer covers.
        share: Fraction of all parameters, in [0, 1].
        reason: Why the parameter is not covered; empty for a layer.
    """

    name: str
    kind: str
    inputs: int | None
    outputs: int | None
    stack: tuple[int, ...]
    shares_input_with: str | None
    parameters: int
    share: float
    reason: str = ""


def coverage_rows(layers: Any, sizes: Mapping[str, int]) -> list[CoverageRow]:
    """Rows of a layer table.

    Args:
        layers: Result of ``jk.find_layers``.
        sizes: ``{parameter path: number of elements}`` of the whole model.

    Returns:
        The layers in their order, then the uncovered parameters.
    """
    total = sum(sizes.values())
    rows = [
        CoverageRow(
            name=layer.name,
            kind=layer.kind,
            inputs=layer.in_features,
            outputs=layer.out_features,
            stack=layer.stack,
            shares_input_with=layer.shares_input_with,
            parameters=layer.num_parameters,
            share=layer.num_parameters / total,
        )
        for layer in (layers[name] for name in layers)
    ]
    for path, reason in layers.uncovered:
        size = sizes.get(path, 0)
        rows.append(
            CoverageRow(path, "uncovered", None, None, (), None, size, size / total, reason)
        )
    return rows


def stack_text(stack: tuple[int, ...]) -> str:
    """``2 x 3`` for a stack of shape (2, 3), empty without a stack."""
    return " × ".join(map(str, stack)) if math.prod(stack) != 1 or stack else ""


# ---------------- tables for a terminal


def spectra_table(records: Sequence[SpectrumRecord]) -> TableOfLayers:
    """One line for each factor of each slice, whose kind is shortened."""
    head, *rows = spectra_cells(records)
    rows = [[layer, SIDE_TEXT[side], *numbers] for layer, side, *numbers in rows]
    return TableOfLayers("Spectra", head, rows, text_columns=(0, 1))


def spectra_cells(records: Sequence[SpectrumRecord]) -> list[list[str]]:
    """Head and rows of a table with one line for each factor of each slice."""
    head = [
        *("layer", "factor", "slice", "size", "top"),
        *("condition", "clipped", "raised", "entropy rank"),
    ]
    rows = [
        [
            record.layer,
            record.side,
            ",".join(map(str, record.slice)),
            str(len(record.raw)),
            number(record.top),
            number(record.condition_raw),
            number(record.condition_clipped),
            str(record.raised),
            f"{record.entropy_rank:.1f}",
        ]
        for record in records
    ]
    return [head, *rows]
