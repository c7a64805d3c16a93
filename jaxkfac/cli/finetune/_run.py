"""`jaxkfac finetune`: load, examine, train, examine again, and write what the run has to show."""

import json
from typing import Any

import jax
from rich.console import Console

import jaxkfac as jk
from jaxkfac.cli._checkpoint import check_output, find_checkpoint
from jaxkfac.cli._devices import devices_line, run_devices
from jaxkfac.cli._host_memory import host_memory
from jaxkfac.cli._phases import phase
from jaxkfac.cli._run_state import as_config
from jaxkfac.cli.finetune._curvature import (
    AdapterCurvature,
    adapter_coverage,
    adapter_curvature,
    resolve_pattern,
)
from jaxkfac.cli.finetune._exam import compare_exams
from jaxkfac.cli.finetune._load import load_model, load_text
from jaxkfac.cli.finetune._loggers import check_loggers
from jaxkfac.cli.finetune._loop import TuneState
from jaxkfac.cli.finetune._options import FinetuneArguments
from jaxkfac.cli.finetune._problem import FinetuneProblem, build_problem
from jaxkfac.cli.finetune._train import train
from jaxkfac.files import write_text
from jaxkfac.interception import leaves_by_path
from jaxkfac.report import (
    CoverageRow,
    finetune_page,
    finetune_table,
    mean_loss,
    versions,
)


def run_finetune(arguments: FinetuneArguments) -> None:
    """Train, write everything, and print the summary."""
    experiment, output = arguments.experiment, arguments.output
    folder = output / "checkpoints"
    _check(arguments)
    check_output(output, [folder], resume=arguments.resume, overwrite=arguments.overwrite)
    devices = run_devices(arguments.devices, arguments.mesh, batch_size=experiment.batch_size)
    console, earlier = Console(stderr=True), jax.live_arrays()
    with jk.memory.track("run") as stages:
        with phase("reading the data"):
            text = load_text(experiment, strict=arguments.strict)
        with jk.memory.track("load the model"), phase("loading the model"):
            problem = build_problem(experiment, load_model(experiment), text, devices)
        console.print(f"data: {problem.described()}", highlight=False)
        if text.bad:
            console.print(
                f"{len(text.bad)} bad rows to validate with are left out, the first {text.bad[0]}",
                highlight=False,
            )
        coverage = adapter_coverage(problem)
        pattern = arguments.curvature
        if pattern is not None:
            pattern = resolve_pattern(pattern, coverage)
        with jk.memory.track("train"), phase("training"):
            state = train(arguments, problem, folder, earlier=earlier)
        curvature = None
        if pattern is not None:
            with jk.memory.track("curvature of the adapter"), phase("measuring curvature"):
                curvature = adapter_curvature(problem, experiment, state, pattern)
    chosen = experiment.adapter
    dialect = "peft" if chosen.fourier_placement == "none" else chosen.dialect
    saved = (state.adapters, problem.config)
    if chosen.split:
        saved = jk.lslora.split(*saved, problem.pretrained.config.parts)
    with phase("writing adapter and report"):
        where = {"base_model": problem.pretrained.path, "task_type": "CAUSAL_LM"}
        jk.lslora.save(output / "adapter", *saved, dialect=dialect, **where)
        summary = _write_results(arguments, problem, state, curvature, coverage, stages)
    kept = (problem.params, state.adapters, state.optimizer)
    summary["devices"] = devices.described(kept)
    if arguments.json:
        print(json.dumps(summary))
        return
    console = Console()
    console.print(finetune_table(state.records, summary["comparison"]))
    if devices.mesh is not None:
        line = devices_line("finetune", state.records.samples_per_second, summary["devices"])
        console.print(line, highlight=False)
    if problem.encoded is None:
        console.print(f"data: {summary['data']}", highlight=False)
    console.print(f"adapter: {output / 'adapter'}", soft_wrap=True, highlight=False)
    console.print(f"report: {output / 'report.html'}", soft_wrap=True, highlight=False)


def _check(arguments: FinetuneArguments) -> None:
    counts = ("checkpoint_every", "log_every", "evaluate_every", "diagnose_every", "sample_tokens")
    for name in counts:
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
    if arguments.samples < 0:
        raise ValueError(f"samples must not be negative, not {arguments.samples}")
    check_loggers(arguments.log)


def _write_results(
    arguments: FinetuneArguments,
    problem: FinetuneProblem,
    state: TuneState,
    curvature: AdapterCurvature | None,
    coverage: list[CoverageRow],
    stages: jk.memory.Stage,
) -> dict[str, Any]:
    output, experiment, records = arguments.output, arguments.experiment, state.records
    read = problem.described(state.position)
    config, software = as_config(experiment), versions()
    comparison = {}
    if len(records.exams) > 1 and records.exams[0].correct:
        comparison = compare_exams(records.exams[0], records.exams[-1])
    spectra = curvature.spectra if curvature else []
    metrics = {
        "config": config,
        "versions": software,
        "records": records.to_plain(),
        "data": {"read": read, **(state.position or {}).get("tally", {})},
        "comparison": comparison,
        "spectra": [record._asdict() for record in spectra],
        **(curvature.capacity.to_dict() if curvature else {}),
        "coverage": [row._asdict() for row in coverage],
        "samples_per_second": records.samples_per_second,
        "host_memory": host_memory(stages),
        "memory": stages.to_dict(),
    }
    output.mkdir(parents=True, exist_ok=True)
    text = json.dumps(metrics, indent=1, allow_nan=False)
    write_text(output / "metrics.json", text, "the measurements of the run")
    sizes = [int(x.size) for x in leaves_by_path(problem.adapters).values()]
    page = finetune_page(
        title=f"{experiment.model}, fine-tuned with LS-LoRA on {experiment.data}",
        lead=f"{sum(sizes):,} parameters of the adapter; {read}.",
        records=records,
        comparison=comparison,
        spectra=spectra,
        capacity=curvature.capacity if curvature else None,
        coverage=coverage,
        config=config,
        versions=software,
        nonlinearity=problem.config.nonlinearity,
        stages=stages,
        host_memory=metrics["host_memory"],
    )
    write_text(output / "report.html", page, "the report")
    return {
        "steps": len(records.losses),
        "data": read,
        "loss": [mean_loss(records.losses, last=last) for last in (False, True)],
        "accuracy": {exam.step: exam.accuracy for exam in records.exams if exam.accuracy},
        "comparison": comparison,
        "samples_per_second": records.samples_per_second,
        "tokens_per_second": records.tokens_per_second,
        "adapter": str(output / "adapter"),
        "report": str(output / "report.html"),
        "metrics": str(output / "metrics.json"),
        "checkpoint": str(find_checkpoint(output / "checkpoints")),
    }
