"""`jaxkfac finetune`: load, examine, train, examine again, and write what the run has to show."""

import json
from typing import Any

import jax
from rich.console import Console

import jaxkfac as jk
from jaxkfac.cli._checkpoint import check_output, find_checkpoint, remove_checkpoints
from jaxkfac.cli._devices import RunDevices, devices_line, run_devices
from jaxkfac.cli._host_memory import host_memory
from jaxkfac.cli._phases import phase
from jaxkfac.cli._processes import RunProcesses, run_processes
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
from jaxkfac.cli.finetune._options import FinetuneArguments
from jaxkfac.cli.finetune._problem import FinetuneProblem, build_problem
from jaxkfac.cli.finetune._train import train
from jaxkfac.files import write_text
from jaxkfac.interception import leaves_by_path
from jaxkfac.report import (
    CoverageRow,
    FinetuneRecords,
    finetune_page,
    finetune_table,
    mean_loss,
    versions,
)


def run_finetune(arguments: FinetuneArguments) -> None:
    """Train, write everything, and print the summary."""
    with run_processes(arguments) as processes:
        _run(arguments, processes)


def _run(arguments: FinetuneArguments, processes: RunProcesses) -> None:
    experiment, output = arguments.experiment, arguments.output
    folder, earlier = output / "checkpoints", jax.live_arrays()
    with processes.together("looking at the output folder"):
        _check(arguments)
        check_output(output, [folder], resume=arguments.resume, overwrite=arguments.overwrite)
        devices = run_devices(
            arguments.devices,
            arguments.mesh,
            batch_size=experiment.batch_size,
            processes=processes,
        )
    if arguments.overwrite and processes.first:
        remove_checkpoints(folder)
    with jk.memory.track("run") as stages:
        with phase("reading the data"), processes.together("reading the data"):
            text = load_text(experiment)
        loading = processes.together("loading the model")
        with jk.memory.track("load the model"), phase("loading the model"), loading as same:
            problem = build_problem(experiment, load_model(experiment), text, devices)
            same.append(problem.data_crc)
        if processes.first:
            Console(stderr=True).print(f"data: {problem.encoded}", highlight=False)
        coverage = adapter_coverage(problem)
        pattern = arguments.curvature
        if pattern is not None:
            pattern = resolve_pattern(pattern, coverage)
        with jk.memory.track("train"), phase("training"):
            state = train(arguments, problem, folder, earlier=earlier)
        curvature = None
        if pattern is not None:
            with jk.memory.track("curvature of the adapter"), phase("measuring curvature"):
                curvature = adapter_curvature(problem, experiment, state.adapters, pattern)
    kept = devices.described((problem.params, state.adapters, state.optimizer))
    with phase("writing adapter and report"), processes.together("writing adapter and report"):
        if processes.first:
            _save_adapter(arguments, problem, state.adapters)
            summary = _write_results(
                arguments, problem, state.records, curvature, coverage, stages, kept
            )
            _print(arguments, state.records, summary, devices)


def _save_adapter(arguments: FinetuneArguments, problem: FinetuneProblem, adapters: Any) -> None:
    chosen = arguments.experiment.adapter
    dialect = "peft" if chosen.fourier_placement == "none" else chosen.dialect
    saved = (adapters, problem.config)
    if chosen.split:
        saved = jk.lslora.split(*saved, problem.pretrained.config.parts)
    where = {"base_model": problem.pretrained.path, "task_type": "CAUSAL_LM"}
    jk.lslora.save(arguments.output / "adapter", *saved, dialect=dialect, **where)


def _print(
    arguments: FinetuneArguments,
    records: FinetuneRecords,
    summary: dict[str, Any],
    devices: RunDevices,
) -> None:
    if arguments.json:
        print(json.dumps(summary))
        return
    console = Console()
    console.print(finetune_table(records, summary["comparison"]))
    if devices.mesh is not None:
        line = devices_line("finetune", records.samples_per_second, summary["devices"])
        console.print(line, highlight=False)
    console.print(f"adapter: {summary['adapter']}", soft_wrap=True, highlight=False)
    console.print(f"report: {summary['report']}", soft_wrap=True, highlight=False)


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
    records: FinetuneRecords,
    curvature: AdapterCurvature | None,
    coverage: list[CoverageRow],
    stages: jk.memory.Stage,
    devices: dict[str, Any],
) -> dict[str, Any]:
    output, experiment = arguments.output, arguments.experiment
    config, software = as_config(experiment), versions()
    comparison = {}
    if len(records.exams) > 1 and records.exams[0].correct:
        comparison = compare_exams(records.exams[0], records.exams[-1])
    spectra = curvature.spectra if curvature else []
    metrics = {
        "config": config,
        "versions": software,
        "records": records.to_plain(),
        "comparison": comparison,
        "spectra": [record._asdict() for record in spectra],
        **(curvature.capacity.to_dict() if curvature else {}),
        "coverage": [row._asdict() for row in coverage],
        "samples_per_second": records.samples_per_second,
        "devices": devices,
        "host_memory": host_memory(stages),
        "memory": stages.to_dict(),
    }
    output.mkdir(parents=True, exist_ok=True)
    text = json.dumps(metrics, indent=1, allow_nan=False)
    write_text(output / "metrics.json", text, "the measurements of the run")
    sizes = [int(x.size) for x in leaves_by_path(problem.adapters).values()]
    page = finetune_page(
        title=f"{experiment.model}, fine-tuned with LS-LoRA on {experiment.data}",
        lead=f"{sum(sizes):,} parameters of the adapter; {problem.encoded}.",
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
        "loss": [mean_loss(records.losses, last=last) for last in (False, True)],
        "accuracy": {exam.step: exam.accuracy for exam in records.exams if exam.accuracy},
        "comparison": comparison,
        "samples_per_second": records.samples_per_second,
        "tokens_per_second": records.tokens_per_second,
        "devices": devices,
        "adapter": str(output / "adapter"),
        "report": str(output / "report.html"),
        "metrics": str(output / "metrics.json"),
        "checkpoint": str(find_checkpoint(output / "checkpoints")),
    }
