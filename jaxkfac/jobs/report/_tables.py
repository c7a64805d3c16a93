"""Tables for the terminal."""

from collections.abc import Mapping, Sequence

from rich.table import Table

from jaxkfac._text import number
from jaxkfac.jobs.report._layer_table import TableOfLayers
from jaxkfac.jobs.report._page import OPTIMIZERS, terminal_table
from jaxkfac.jobs.report._race import TO_TARGET, RunRecords, at_target
from jaxkfac.jobs.report._spectra import SIDE_TEXT, CoverageRow, SpectrumRecord, stack_text


def runs_table(runs: Mapping[str, RunRecords]) -> Table:
    """Updates and seconds to 3 % error, and the last epoch of each run."""
    head = ["optimizer", *TO_TARGET, "updates", "train loss", "test acc.", "train s", "compile s"]
    head = [name.replace(" ", "\n", 1) for name in head]  # 80 columns hold all of them
    rows = []
    for name, run in runs.items():
        last = run.epochs[-1]
        rows.append(
            [
                OPTIMIZERS[name][0],
                *at_target([run]),
                str(last.step),
                f"{last.train_loss:.4f}",
                f"{last.test_accuracy:.2%}",
                f"{last.seconds:.1f}",
                f"{run.compile_seconds:.1f}",
            ]
        )
        if run.skipped:
            rows.append([f"  {run.skipped} skipped: not finite"])
    return terminal_table("Result", head, rows, no_wrap=True)


def coverage_table(rows: Sequence[CoverageRow]) -> Table:
    """Which parameters are covered, and by which layer."""
    remarks = "shares its input with, or is not covered because"
    head = ["layer", "kind", "in", "out", "stack", "parameters", "share", remarks]
    cells = []
    for row in rows:
        sizes = ["" if x is None else str(x) for x in (row.inputs, row.outputs)]
        numbers = [stack_text(row.stack), str(row.parameters), f"{row.share:.1%}"]
        remark = row.reason or row.shares_input_with or ""
        cells.append([row.name, row.kind, *sizes, *numbers, remark])
    return terminal_table("Coverage", head, cells, text_columns=(0, 1, 7))


def spectra_table(records: Sequence[SpectrumRecord]) -> TableOfLayers:
    """One line for each factor of each slice."""
    head = [
        *("layer", "factor", "slice", "size", "top"),
        *("condition", "clipped", "raised", "entropy rank"),
    ]
    rows = [
        [
            record.layer,
            SIDE_TEXT[record.side],
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
    return TableOfLayers("Spectra", head, rows, text_columns=(0, 1))
