"""Tables for the terminal."""

from collections.abc import Mapping, Sequence

from rich.table import Table

from jaxkfac._text import number
from jaxkfac.report._coverage import CoverageRow, stack_text
from jaxkfac.report._records import RunRecords
from jaxkfac.report._spectra import SpectrumRecord
from jaxkfac.report._style import OPTIMIZERS


def runs_table(runs: Mapping[str, RunRecords]) -> Table:
    """The last epoch of each run."""
    table = Table(title="Result", title_justify="left", box=None, pad_edge=False)
    table.add_column("optimizer", no_wrap=True)
    for name in ("updates", "examples", "train loss", "test acc.", "train s", "compile s"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, run in runs.items():
        last = run.epochs[-1]
        table.add_row(
            OPTIMIZERS[name][0],
            str(last.step),
            str(last.examples),
            f"{last.train_loss:.4f}",
            f"{last.test_accuracy:.2%}",
            f"{last.seconds:.1f}",
            f"{run.compile_seconds:.1f}",
        )
        if run.skipped:
            table.add_row(f"  {run.skipped} skipped: not finite")
    return table


def coverage_table(rows: Sequence[CoverageRow]) -> Table:
    """Which parameters are covered, by what."""
    table = Table(title="Coverage", title_justify="left", box=None, pad_edge=False)
    table.add_column("layer", overflow="fold")
    table.add_column("kind")
    for name in ("in", "out", "stack", "parameters", "share"):
        table.add_column(name, justify="right")
    table.add_column("shares its input with, or is not covered because", overflow="fold")
    for row in rows:
        sizes = ["" if x is None else str(x) for x in (row.inputs, row.outputs)]
        numbers = [stack_text(row.stack), str(row.parameters), f"{row.share:.1%}"]
        remark = row.reason or row.shares_input_with or ""
        table.add_row(row.name, row.kind, *sizes, *numbers, remark)
    return table


def spectra_table(records: Sequence[SpectrumRecord]) -> Table:
    """One line for each factor of each slice."""
    table = Table(title="Spectra", title_justify="left", box=None, pad_edge=False)
    table.add_column("layer", overflow="fold")
    table.add_column("factor")
    for name in ("slice", "size", "top", "condition", "clipped", "raised", "entropy rank"):
        table.add_column(name, justify="right")
    for record in records:
        table.add_row(
            record.layer,
            record.side,
            ",".join(map(str, record.slice)),
            str(len(record.raw)),
            number(record.top),
            number(record.condition_raw),
            number(record.condition_clipped),
            str(record.raised),
            f"{record.entropy_rank:.1f}",
        )
    return table
