"""`jaxkfac analyze` for a pretrained model: plan, run the stages, and write the results."""

import contextlib
import json
import shutil
from pathlib import Path

from rich.console import Console

import jaxkfac as jk
from jaxkfac.files import write_text
from jaxkfac.jobs.cli._checkpoint import as_config, check_output
from jaxkfac.jobs.cli._interrupts import nothing_begun
from jaxkfac.jobs.cli._options import AnalyzeArguments, check_least
from jaxkfac.jobs.cli._progress import host_memory, phase
from jaxkfac.jobs.cli.analysis._stages import Found, Prepared, give_blocks_back, prepare, run_stages
from jaxkfac.jobs.report import (
    AnalysisRecord,
    CapacityReport,
    ModelMemory,
    analysis_page,
    memory_plan_table,
    print_analysis,
    spectrum_records,
    versions,
    write_factor_figures,
)

_OTHER = "compared"


def run_analysis(arguments: AnalyzeArguments) -> None:
    """Analyze a pretrained model, or print the plan."""
    _check(arguments)
    give_blocks_back()
    console = Console(stderr=arguments.json)
    models = {str(arguments.checkpoint): arguments.output}
    if arguments.compare is not None:
        models[str(arguments.compare)] = arguments.output / _OTHER
    with jk.memory.track("analysis") as stages:
        results: list[Found] = []
        plans: list[ModelMemory] = []
        first: Prepared | None = None
        for number, (model, path) in enumerate(models.items()):
            # Separate tracking: stages of the same names would be merged with the first model's.
            tracking = (
                contextlib.nullcontext(stages) if number == 0 else jk.memory.track("compared")
            )
            with tracking as model_stages:
                with contextlib.nullcontext() if results else nothing_begun():
                    with jk.memory.track("plan"):
                        ready = prepare(arguments, model, path, exact=number == 0)
                    console.print(memory_plan_table(model, ready.rows, disk=ready.disk))
                    if arguments.plan:
                        continue
                    if arguments.overwrite and not results:  # texts, model and options are valid
                        _remove(arguments.output)
                results.append(run_stages(ready, arguments))
            peaks = _peaks(model_stages)
            passes = len(ready.analysis.passes)
            plans.append(ModelMemory(model, ready.rows, peaks, passes, ready.disk))
            first = first or ready
            del ready
    if first is None:
        return
    with phase("measuring capacity"):
        record = _record(arguments, first, results, plans, stages)
    with phase("writing the report"):
        _write(arguments, record)
    for path in models.values():
        _clean(arguments, path, all_decomposed=arguments.model.decompose == ".*")
    if arguments.json:
        print(json.dumps(record.to_dict(), allow_nan=False))
        return
    print_analysis(console, record, tables=arguments.tables)
    console.print(f"report: {_page(arguments)}", soft_wrap=True, highlight=False)


def _check(arguments: AnalyzeArguments) -> None:
    if arguments.batches is not None:
        raise ValueError(
            "--batches cuts the test examples of a checkpoint of `jaxkfac train`; for a "
            "pretrained model give --texts"
        )
    if arguments.compare == arguments.checkpoint:
        raise ValueError(f"--compare {arguments.compare} is the model itself")
    check_least(arguments, 1, "checkpoint_every")
    is_begun = not arguments.plan and (arguments.output / "analysis.json").exists()
    check_output(arguments, "an analysis" if is_begun else "", writes=not arguments.plan)


def _remove(output: Path) -> None:
    """Delete the files that an analysis has written, and nothing else."""
    if not (output / "analysis.json").exists():
        return
    (output / "report.html").unlink(missing_ok=True)
    for path in (output / _OTHER, output):
        for name in ("factors", "spectra", "lanczos"):
            shutil.rmtree(path / name, ignore_errors=True)
        for name in ("gathered", "exact", "metrics", "analysis"):  # analysis.json marks the rest
            (path / f"{name}.json").unlink(missing_ok=True)


def _clean(arguments: AnalyzeArguments, path: Path, *, all_decomposed: bool) -> None:
    """Delete what can be computed again, after its last use."""
    shutil.rmtree(path / "lanczos", ignore_errors=True)
    if all_decomposed and not arguments.keep_factors:
        shutil.rmtree(path / "factors", ignore_errors=True)


def _peaks(stages: jk.memory.Stage) -> dict[str, int]:
    """Peak bytes of main memory in each stage of one model."""
    stage_peaks = ((stage.name, stage.resident_peak) for stage in stages.stages)
    return {name: peak.nbytes for name, peak in stage_peaks if peak is not None}


def _record(
    arguments: AnalyzeArguments,
    ready: Prepared,
    results: list[Found],
    plans: list[ModelMemory],
    stages: jk.memory.Stage,
) -> AnalysisRecord:
    examples = arguments.num_examples or ready.texts.num_terms
    measured = [
        jk.capacity_metrics(x.bases, num_examples=examples, damping=arguments.damping)
        for x in results
    ]
    capacity = CapacityReport(measured[0])
    if arguments.compare is not None:
        comparison = jk.compare_capacity(measured[1], measured[0])
        capacity = capacity._replace(comparison=comparison, before=str(arguments.compare))
    exact = results[0].exact
    return AnalysisRecord(
        model=str(arguments.checkpoint),
        texts={
            "texts": ready.texts.num_texts,
            "tokens": ready.texts.num_terms,
            "left out": ready.texts.num_bad,
            "loss": results[0].loss,
        },
        spectra=spectrum_records(results[0].bases),
        capacity=capacity,
        exact=None if exact is None else exact._asdict(),
        plans=plans,
        coverage=ready.coverage,
        config=as_config(arguments.model) | {"damping": arguments.damping},
        versions=versions(),
        stages=stages,
        host_memory=host_memory(stages),
    )


def _write(arguments: AnalyzeArguments, record: AnalysisRecord) -> None:
    text = json.dumps(record.to_dict(), allow_nan=False)
    write_text(arguments.output / "metrics.json", text, "the measurements of the analysis")
    page = _page(arguments)
    page.parent.mkdir(parents=True, exist_ok=True)
    write_text(page, analysis_page(record), "the report")
    if arguments.figures:
        write_factor_figures(arguments.figures, record.spectra)


def _page(arguments: AnalyzeArguments) -> Path:
    return arguments.report or arguments.output / "report.html"
