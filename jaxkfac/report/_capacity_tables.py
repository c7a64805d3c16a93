"""Capacity metrics for the terminal."""

from rich.table import Table

from jaxkfac.curvature.capacity import columns
from jaxkfac.report._capacity import (
    CapacityReport,
    change_rows,
    layer_rows,
    model_head,
    model_rows,
    model_title,
)
from jaxkfac.report._terminal import terminal_table


def capacity_table(report: CapacityReport) -> Table:
    """One line for each layer, all slices of a stack together, and one for the whole model."""
    return terminal_table("Capacity", ["layer", *columns()], layer_rows(report), total=True)


def model_table(report: CapacityReport) -> Table:
    """Every metric of the whole model, with intervals and changes where there are any."""
    table = terminal_table(model_title(report), model_head(report))
    for part in model_rows(report):
        table.add_row(part.title, style="dim italic")
        for row in part.rows:
            table.add_row(f"  {row[0]}", *row[1:])
    return table


def comparison_table(report: CapacityReport) -> Table:
    """For each layer of both checkpoints the ratio of every column, after over before."""
    title = f"Capacity, ratio to {report.before}"
    return terminal_table(title, ["layer", *columns()], change_rows(report), total=True)
