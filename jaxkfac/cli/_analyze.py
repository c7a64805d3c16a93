"""`jaxkfac analyze`: spectra and capacity of the factors stored in a checkpoint."""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from jaxkfac.cli._capacity import capacity_report
from jaxkfac.cli._checkpoint import Checkpoint, load_checkpoint
from jaxkfac.cli._options import AnalyzeArguments
from jaxkfac.cli._phases import phase
from jaxkfac.cli._restored import restore
from jaxkfac.curvature.capacity import legend
from jaxkfac.files import probe_folder, whole_file, write_text
from jaxkfac.report import (
    CapacityReport,
    RunRecords,
    SpectrumRecord,
    capacity_table,
    comparison_table,
    factor_figures,
    interval_words,
    model_table,
    only_in_one,
    report_page,
    spectra_table,
    spectrum_records,
    versions,
)


def run_analyze(arguments: AnalyzeArguments) -> None:
    """Decompose, print the tables or JSON, and write the page and figures asked for."""
    if arguments.is_pretrained:
        from jaxkfac.cli.analysis._run import run_analysis

        return run_analysis(arguments)
    _check_options(arguments)
    if arguments.batches is not None and arguments.batches < 2:
        raise ValueError(f"batches must be at least 2, not {arguments.batches}")
    for folder in (arguments.figures, arguments.report and arguments.report.parent):
        if folder:
            probe_folder(folder)
    with phase("loading the checkpoint"):
        checkpoint = load_checkpoint(arguments.checkpoint)
        restored = restore(checkpoint)
    with phase("decomposing the factors"):
        spectra = spectrum_records(restored.decompose(restored.factors, arguments.max_condition))
    with phase("measuring capacity"):
        capacity = capacity_report(arguments, restored)
    if arguments.report:
        _write_page(arguments.report, checkpoint, spectra, capacity)
    if arguments.figures:
        arguments.figures.mkdir(parents=True, exist_ok=True)
        for name, svg in factor_figures(spectra).items():
            path = arguments.figures / f"{name}.svg"
            with whole_file(path, f"the figure {name}", nbytes=len(svg)) as file:
                file.write(svg)
    if arguments.json:
        plain = [record._asdict() for record in spectra]
        found = {"step": checkpoint.step, "spectra": plain, **capacity.to_dict()}
        print(json.dumps(found, allow_nan=False))
        return
    console = Console()
    console.print(spectra_table(spectra))
    console.print(capacity_table(capacity))
    if capacity.comparison is not None:
        console.print(comparison_table(capacity))
        for line in only_in_one(capacity):
            console.print(line)
    console.print(model_table(capacity))
    console.print(legend(), style="dim")
    if capacity.interval is not None:
        console.print(f"batch mean, interval: {interval_words(capacity)}", style="dim")
    for name, written in (("report", arguments.report), ("figures", arguments.figures)):
        if written:
            console.print(f"{name}: {written}", soft_wrap=True, highlight=False)


def _check_options(arguments: AnalyzeArguments) -> None:
    """Refuse options of a pretrained model, whose kind a mistyped path has lost."""
    default = AnalyzeArguments(arguments.checkpoint)
    for name in ("model", "plan", "device_bytes", "resume", "overwrite", "keep_factors"):
        if getattr(arguments, name) != getattr(default, name):
            words = "such options as --texts" if name == "model" else f"--{name.replace('_', '-')}"
            raise ValueError(
                f"{words} are for a pretrained model, and {arguments.checkpoint} is none: expected "
                "a folder with config.json, a .gguf file or smollm2"
            )


def _write_page(
    path: Path, checkpoint: Checkpoint, spectra: Sequence[SpectrumRecord], capacity: CapacityReport
) -> None:
    page = report_page(
        title="Spectra and capacity of the factors",
        lead=f"After {checkpoint.step} updates of a vision transformer on handwritten digits.",
        runs={checkpoint.optimizer: RunRecords.from_plain(checkpoint.records)}
        if checkpoint.records["epochs"]
        else {},
        spectra=spectra,
        capacity=capacity,
        coverage=[],
        config=checkpoint.config,
        versions=versions(),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, page, "the report")
