"""Capacity as text: aligned, at most 120 columns wide."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxkfac._text import WIDTH, aligned, number
from jaxkfac.curvature.capacity._record import CapacityRecord, Scalar

_COLUMNS = {
    "dim": "dimension",
    "trace": "trace",
    "part. ratio": "participation_ratio",
    "H rank": "entropy_rank",
    "stable": "stable_rank",
    "cond.": "condition",
    "clipped": "condition_clipped",
    "eff. dim": "effective_dimension",
    "local": "local_effective_dimension",
    "PAC": "pac_bayes_complexity",
}
_LEGEND = (
    "part. ratio: (Σλ)² / Σλ²; H rank: exp(entropy); stable: Σλ² / λmax²; cond., clipped: λmax /",
    "λmin before and after clipping; eff. dim: Σ Nλ / (Nλ + δ); local: local effective dimension;",
    "PAC: √(trace / N); –: infinite or undefined",
)


def capacity_text(metrics: Any) -> str:
    """The table that ``print(metrics)`` shows."""
    rows = [
        [name, *_cells(record)] for name, record in (*metrics.layers.items(), ("", metrics.model))
    ]
    rows[-1][0] = "whole model"
    over = metrics.over_layers
    largest = ", ".join(map(number, (over.largest_condition, over.largest_condition_clipped)))
    lines = ruled(["layer", *_COLUMNS], rows)
    lines.insert(-1, "-" * len(lines[1]))
    lines += [
        f"over layers: mean participation ratio {number(over.mean_participation_ratio)}, mean "
        f"entropy rank {number(over.mean_entropy_rank)},",
        f"largest condition before and after clipping {largest}",
        f"N = {metrics.num_examples:,g}, δ = {metrics.damping:g}",
        *_LEGEND,
    ]
    if metrics.not_counted:
        lines.append(
            "not part of the whole model (another layer answers for the parameters): "
            + ", ".join(metrics.not_counted)
        )
    return "\n".join(lines)


def ruled(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table with a rule below its head."""
    head_line, *lines = aligned([head, *rows], width=WIDTH)
    return [head_line, "-" * len(head_line), *lines]


def _cells(record: CapacityRecord) -> list[str]:
    values: Mapping[str, Scalar] = record.scalars()
    return [number(values[field]) for field in _COLUMNS.values()]
