"""Capacity as text: aligned, at most 120 columns wide."""

import textwrap
from typing import Any

from jaxkfac._display import table_html
from jaxkfac._text import WIDTH, number, ruled
from jaxkfac.curvature.capacity._metric import columns, legend
from jaxkfac.curvature.capacity._record import CapacityRecord


def capacity_text(metrics: Any) -> str:
    """The table that ``print(metrics)`` shows."""
    lines = ruled(["layer", *columns()], _rows(metrics), total=True)
    return "\n".join([*lines, *_notes(metrics)])


def capacity_html(metrics: Any) -> str:
    """The same for a notebook."""
    title = f"Capacity of {len(metrics)} layers"
    head = [heading.replace("\n", " ") for heading in ("layer", *columns())]
    return table_html(title, head, _rows(metrics), notes=_notes(metrics))


def _rows(metrics: Any) -> list[list[str]]:
    records = (*metrics.layers.items(), ("whole model", metrics.model))
    return [[name, *_cells(record)] for name, record in records]


def _notes(metrics: Any) -> list[str]:
    over = metrics.over_layers
    largest = ", ".join(map(number, (over.largest_condition, over.largest_condition_clipped)))
    lines = [
        f"over layers: mean participation ratio {number(over.mean_participation_ratio)}, mean "
        f"entropy rank {number(over.mean_entropy_rank)},",
        f"largest condition before and after clipping {largest}",
        f"N = {metrics.num_examples:,g}, δ = {metrics.damping:g}",
        *textwrap.wrap(legend(), WIDTH),
    ]
    if metrics.not_counted:
        lines.append(
            "not part of the whole model (another layer answers for the parameters): "
            + ", ".join(metrics.not_counted)
        )
    return lines


def _cells(record: CapacityRecord) -> list[str]:
    values = record.scalars()
    return [number(values.get(name)) for name in columns().values()]
