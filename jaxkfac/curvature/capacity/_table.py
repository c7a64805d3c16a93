"""Capacity as text: aligned, at most 120 columns wide."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxkfac.curvature.capacity._record import CapacityRecord, Scalar

WIDTH = 120
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
    lines = aligned(["layer", *_COLUMNS], rows)
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


def number(value: Scalar) -> str:
    """Three significant digits, whole below 100,000; a dash for undefined or infinite."""
    if value is None:
        return "–"
    if isinstance(value, int) or 999.5 <= abs(value) < 99_999.5:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table: the first column to the left, cut at its front if it is too long."""
    cells = [head, *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    room = WIDTH - sum(widths[1:]) - 2 * (len(head) - 1)
    widths[0] = min(widths[0], max(room, 12))
    lines = [
        "  ".join(
            [shortened(row[0], widths[0]).ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        )
        for row in cells
    ]
    return [lines[0], "-" * len(lines[0]), *lines[1:]]


def shortened(name: str, width: int) -> str:
    """The end of a name that is too long: it says which layer, the front which block."""
    return name if len(name) <= width else "…" + name[1 - width :]


def _cells(record: CapacityRecord) -> list[str]:
    values: Mapping[str, Scalar] = record.scalars()
    return [number(values[field]) for field in _COLUMNS.values()]
