"""Capacity metrics for the terminal."""

from collections.abc import Sequence

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


def capacity_table(report: CapacityReport) -> Table:
    """One line for each layer, all slices of a stack together, and one for the whole model."""
    return _with_total(_numbers("Capacity", ["layer", *columns()]), layer_rows(report))


def model_table(report: CapacityReport) -> Table:
    """Every metric of the whole model, with intervals and changes where there are any."""
    table = _numbers(model_title(report), model_head(report))
    for part in model_rows(report):
        table.add_row(part.title, style="dim italic")
        for row in part.rows:
            table.add_row(f"  {row[0]}", *row[1:])
    return table


def comparison_table(report: CapacityReport) -> Table:
    """For each layer of both checkpoints the ratio of every column, after over before."""
    table = _numbers(f"Capacity, ratio to {report.before}", ["layer", *columns()])
    return _with_total(table, change_rows(report))


def _with_total(table: Table, rows: Sequence[Sequence[str]]) -> Table:
    for row in rows[:-1]:
        table.add_row(*row)
    for row in rows[-1:]:
        table.add_row(*row, style="bold")
    return table


def _numbers(title: str, head: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column(head[0], overflow="fold")
    for name in head[1:]:
        table.add_column(name, justify="right")
    return table
