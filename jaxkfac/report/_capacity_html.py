"""Capacity metrics as part of the page."""

from html import escape

from jaxkfac.curvature.capacity import columns
from jaxkfac.report._capacity import (
    CapacityReport,
    change_rows,
    interval_words,
    layer_rows,
    model_head,
    model_rows,
    model_title,
    only_in_one,
)
from jaxkfac.report._html_parts import table_html

_FEW = 60  # rows that are shown at once


def capacity_html(report: CapacityReport) -> str:
    """Tables of the layers and of the whole model, and of what has changed."""
    parts = [_of_layers(layer_rows(report), "every layer")]
    rows = [
        row
        for part in model_rows(report)
        for row in ((part.title, *[""] * (len(model_head(report)) - 1)), *part.rows)
    ]
    parts += [
        f"<h3>{escape(model_title(report))}</h3>",
        table_html(model_head(report), rows, text=1),
    ]
    if report.interval is not None:
        parts.append(f"<p>Mean and interval: {escape(interval_words(report))}</p>")
    if report.comparison is not None:
        parts += [
            f"<h3>Ratio to {escape(report.before)}</h3>",
            _of_layers(change_rows(report), "the ratio of every layer"),
            *(f"<p>{escape(line)}</p>" for line in only_in_one(report)),
        ]
    return "".join(parts)


def _of_layers(rows: list[tuple[str, ...]], what: str) -> str:
    """A table of layers and the whole model; of many layers all but the last behind a fold."""
    head = ["layer", *columns()]
    table = table_html(head, rows, text=1)
    if len(rows) <= _FEW:
        return table
    whole = table_html(head, rows[-1:], text=1)
    return f"{whole}<details><summary>{len(rows) - 1} layers: {what}</summary>{table}</details>"
