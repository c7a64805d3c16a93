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


def capacity_html(report: CapacityReport) -> str:
    """Tables of the layers and of the whole model, and of what has changed."""
    parts = [table_html(["layer", *columns()], layer_rows(report), text=1)]
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
        head = ["layer", *columns()]
        parts += [
            f"<h3>Ratio to {escape(report.before)}</h3>",
            table_html(head, change_rows(report), text=1),
            *(f"<p>{escape(line)}</p>" for line in only_in_one(report)),
        ]
    return "".join(parts)
