"""`jaxkfac finetune`: load, evaluate, train, evaluate again, and write the results."""

import functools
import json
import re
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console

import jaxkfac as jk
from jaxkfac._arguments import ArrayTree, leaves_by_path
from jaxkfac.files import write_text
from jaxkfac.interception import selector
from jaxkfac.jobs.cli._checkpoint import (
    RESUME_OR_OVERWRITE,
    check_output,
    existing_run,
    remove_checkpoints,
)
from jaxkfac.jobs.cli._devices import check_devices, devices_line, run_devices
from jaxkfac.jobs.cli._interrupts import nothing_begun
from jaxkfac.jobs.cli._options import check_least, labels_sentence
from jaxkfac.jobs.cli._paths import find_checkpoint
from jaxkfac.jobs.cli._processes import RunProcesses, check_processes, run_processes
from jaxkfac.jobs.cli._progress import host_memory, phase, said_if_slow, say
from jaxkfac.jobs.cli.finetune._exam import compare_exams
from jaxkfac.jobs.cli.finetune._load import family_of, load_model, load_text, model_shapes
from jaxkfac.jobs.cli.finetune._loggers import check_loggers
from jaxkfac.jobs.cli.finetune._loop import TuneState
from jaxkfac.jobs.cli.finetune._options import PRESETS, FinetuneArguments, Finetuning
from jaxkfac.jobs.cli.finetune._plan import print_plan, run_shapes, shaped_objective
from jaxkfac.jobs.cli.finetune._problem import (
    FinetuneProblem,
    build_problem,
    objective_of,
    options_of,
)
from jaxkfac.jobs.cli.finetune._train import train
from jaxkfac.jobs.cli.finetune._watch import remove_best
from jaxkfac.jobs.data.pairs import rouge_package
from jaxkfac.jobs.data.stream import BatchStream
from jaxkfac.jobs.report import (
    CapacityReport,
    CoverageRow,
    ExamRecord,
    FinetuneRecords,
    SpectrumRecord,
    coverage_rows,
    finetune_page,
    finetune_table,
    spectrum_records,
    versions,
)

# ---------------- curvature of the adapter: coverage, spectra and capacity


class AdapterCurvature(NamedTuple):
    """Curvature of one batch at the end of a run.

    Attributes:
        spectra: Eigenvalues of each factor of each slice.
        capacity: Metrics of the chosen layers.
    """

    spectra: list[SpectrumRecord]
    capacity: CapacityReport


def adapter_coverage(experiment: Finetuning, problem: FinetuneProblem) -> list[CoverageRow]:
    """Which of the trained parameters the factors cover; computes nothing."""
    objective = objective_of(experiment, problem, problem.params)
    table = jk.find_layers(objective, problem.adapters, problem.rows)
    sizes = {path: int(np.prod(x.shape)) for path, x in leaves_by_path(problem.adapters).items()}
    return coverage_rows(table, sizes)


def resolve_pattern(pattern: str, coverage: list[CoverageRow]) -> str:
    """The pattern, or for ``"auto"`` a pattern of the adapter whose largest factor is smallest.

    Called before training, so that a pattern without a match raises at once.

    Raises:
        UnknownLayerError: the pattern matches no covered layer; names the nearest.
    """
    covered = [row for row in coverage if not row.reason]
    if pattern == "auto":
        sides: dict[str, int] = {}
        for row in covered:
            adapter = row.name.rpartition("/")[0]
            sides[adapter] = max(sides.get(adapter, 0), row.inputs or 0, row.outputs or 0)
        return re.escape(min(sides, key=lambda adapter: sides[adapter])) + "/[^/]*"
    selector(pattern, [row.name for row in covered])
    return pattern


def adapter_curvature(
    problem: FinetuneProblem, experiment: Finetuning, state: TuneState, pattern: str
) -> AdapterCurvature:
    """Factors of the adapter's layers that ``pattern`` names, on the first training batch.

    The Fisher is ``experiment.kfac.fisher``, sides beyond ``max_dense`` are diagonals, and dropout
    is off.
    """
    devices = problem.devices

    @functools.partial(jax.jit, **devices.of_program())
    def collect(params: ArrayTree, adapters: ArrayTree, batch: ArrayTree, key: jax.Array) -> Any:
        collected = jk.value_grad_and_factors(
            objective_of(experiment, problem, params, drops=False),
            fisher=experiment.kfac.fisher,
            layers=pattern,
            uncovered="ignore",
            max_dense=experiment.kfac.max_dense,
        )
        exist = problem.family.exist(batch)
        return collected(adapters, batch, key=key, positions=exist).factors

    batch = problem.family.batch(problem.train.first())
    key = jax.random.key(experiment.seed)
    placed_batch = devices.replicated(batch)
    factors = devices.processes.settled(collect(problem.params, state.adapters, placed_batch, key))
    bases = jk.eigendecompose(
        factors, max_condition=experiment.kfac.max_condition, placement="host", vectors=False
    )
    assert state.position is not None  # at least one update was made
    metrics = jk.capacity_metrics(bases, num_examples=problem.learnt(state.position))
    sizes = (int(x.size) for x in leaves_by_path(problem.adapters).values())
    report = CapacityReport(metrics, parameters=sum(sizes))
    return AdapterCurvature(spectrum_records(bases), report)


# ---------------- the command


def run_finetune(arguments: FinetuneArguments) -> None:
    """Train, write the results, and print the summary; or print the plan."""
    if arguments.plan:
        _check(arguments)
        _check_pattern(arguments)
        with said_if_slow("finetune: planning"):
            return print_plan(arguments)
    with run_processes(arguments) as processes:
        _run(arguments, processes)


def _run(arguments: FinetuneArguments, processes: RunProcesses) -> None:
    output, earlier = arguments.output, jax.live_arrays()
    folder = output / "checkpoints"
    with nothing_begun(), processes.together("looking at the output folder"):
        _check(arguments)
        check_output(arguments, existing_run([folder]), writes=processes.first)
        experiment = arguments.experiment
        devices = run_devices(arguments, processes)
    if arguments.overwrite and processes.first:
        remove_checkpoints(folder)
        remove_best(folder)
    with jk.memory.track("run") as stages:
        if processes.first:
            say("finetune: reading the data and the model")
        with phase("reading the data"), processes.together("reading the data"):
            text = load_text(experiment, strict=arguments.strict)
        loading = processes.together("loading the model")
        with (
            jk.memory.track("load the model"),
            phase("loading the model"),
            loading as shared_values,
        ):
            # the checkpoint of a resumed run holds all parameters
            goes_on = arguments.resume and find_checkpoint(folder) is not None
            load = model_shapes if goes_on and experiment.train == "all" else load_model
            problem = build_problem(experiment, load(experiment), text, devices)
            shared_values.append(problem.data_crc)
        if processes.first:
            _say_what_is_read(problem)
        coverage = adapter_coverage(experiment, problem)
        pattern = arguments.curvature
        if pattern is not None:
            pattern = resolve_pattern(pattern, coverage)
        with jk.memory.track("train"), phase("training"):
            state = train(arguments, problem, folder, earlier=earlier)
        curvature = None
        if pattern is not None:
            doing = "finetune: measuring the curvature of the adapter"
            with (
                jk.memory.track("curvature of the adapter"),
                phase("measuring curvature"),
                said_if_slow(doing),
            ):
                curvature = adapter_curvature(problem, experiment, state, pattern)
    device_use = devices.described((problem.params, state.adapters, state.optimizer))
    doing = "writing what was trained, and the report"
    with phase(doing), processes.together(doing):
        if processes.first:
            saved = _save(arguments, problem, state.adapters)
            summary = _write_results(
                arguments, problem, state, curvature, coverage, stages, device_use
            )
            _print(arguments, problem, state.records, summary | saved, saved)


def _say_what_is_read(problem: FinetuneProblem) -> None:
    console, bad = Console(stderr=True), problem.text.bad
    console.print(f"data: {problem.described()}", highlight=False, soft_wrap=True)
    if bad:
        left_out = f"{len(bad)} bad rows to validate with are left out, the first {bad[0]}"
        console.print(left_out, highlight=False, soft_wrap=True)


def _print(
    arguments: FinetuneArguments,
    problem: FinetuneProblem,
    records: FinetuneRecords,
    summary: dict[str, Any],
    saved: dict[str, str],
) -> None:
    if arguments.json:
        print(json.dumps(summary))
        return
    console = Console()
    console.print(finetune_table(records, summary["comparison"], problem.reference))
    if best := summary["best"]:
        saved_text = f"saved: update {best['step']}, with validation loss {best['loss']:.4f}"
        console.print(f"{saved_text}, of {len(records.losses)}", highlight=False)
    if problem.devices.mesh is not None:
        line = devices_line("finetune", records.samples_per_second, summary["devices"])
        console.print(line, highlight=False)
    if isinstance(problem.train, BatchStream):
        console.print(f"data: {summary['data']}", soft_wrap=True, highlight=False)
    for name, path in (*saved.items(), ("report", summary["report"])):
        console.print(f"{name}: {path}", soft_wrap=True, highlight=False)


def _check_pattern(arguments: FinetuneArguments) -> None:
    """Refuse a ``--curvature`` that matches nothing, from shapes alone."""
    experiment, pattern = arguments.experiment, arguments.curvature
    if pattern not in (None, "auto"):
        shapes = run_shapes(experiment)
        objective, batch = shaped_objective(experiment, shapes)
        layers = jk.find_layers(objective, shapes.adapters, batch)
        sizes = {path: int(np.prod(x.shape)) for path, x in leaves_by_path(shapes.adapters).items()}
        resolve_pattern(pattern, coverage_rows(layers, sizes))


def _check(arguments: FinetuneArguments) -> None:
    """Refuse values and combinations that need neither data nor weights to be refused."""
    experiment, family = arguments.experiment, family_of(arguments.experiment)
    family.check(experiment)
    default = PRESETS[arguments.preset]
    for name in family.unread:
        owner, usual = (
            (experiment, default.experiment) if hasattr(experiment, name) else (arguments, default)
        )
        if getattr(owner, name) != getattr(usual, name):
            option = name.replace("_", "-")
            raise ValueError(f"--{option} is for pairs, and {experiment.model} is a decoder")
    if not arguments.plan:
        for name in ("device_bytes", "compiler"):
            if getattr(arguments, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} goes with --plan")
    if arguments.resume and arguments.overwrite:
        raise ValueError(RESUME_OR_OVERWRITE)
    if arguments.plan:  # a run asks its processes first
        check_devices(arguments.devices, arguments.mesh, experiment.batch_size)
        check_processes(arguments.coordinator, arguments.processes, arguments.process)
    counts = ("checkpoint_every", "log_every", "evaluate_every", "diagnose_every")
    counts += ("sample_tokens", "num_beams", "patience")
    check_least(arguments, 1, *counts)
    check_least(arguments, 0, "samples", "generate")
    if arguments.patience is not None and arguments.evaluate_every is None:
        raise ValueError("--patience counts evaluations: give --evaluate-every with it")
    if arguments.rouge:
        rouge_package()
    check_loggers(arguments.log)


def _save(
    arguments: FinetuneArguments, problem: FinetuneProblem, adapters: ArrayTree
) -> dict[str, str]:
    """Write the adapter, or the model; return its kind and path."""
    pretrained, config, output = problem.pretrained, problem.config, arguments.output
    if config is None:
        problem.family.save(output / "model", pretrained._replace(params=adapters))
        return {"model": str(output / "model")}
    chosen, saved = arguments.experiment.adapter, (adapters, config)
    if chosen.split:
        saved = jk.lslora.split(*saved, pretrained.config.parts)
    dialect = "peft" if chosen.fourier_placement == "none" else chosen.dialect
    where = {"base_model": pretrained.path, "task_type": problem.family.task_type}
    jk.lslora.save(output / "adapter", *saved, dialect=dialect, **where)
    return {"adapter": str(output / "adapter")}


def _write_results(
    arguments: FinetuneArguments,
    problem: FinetuneProblem,
    state: TuneState,
    curvature: AdapterCurvature | None,
    coverage: list[CoverageRow],
    stages: jk.memory.Stage,
    devices: dict[str, Any],
) -> dict[str, Any]:
    output, experiment, records = arguments.output, arguments.experiment, state.records
    read = problem.described(state.position)
    config, software = options_of(experiment, problem), versions()
    comparison, best = {}, None
    if arguments.evaluate_every is not None:
        best = records.best
    if len(records.exams) > 1 and records.exams[0].correct:
        comparison = compare_exams(records.exams[0], best or records.exams[-1])
    spectra = curvature.spectra if curvature else []
    metrics = {
        "config": config,
        "versions": software,
        "records": records.to_plain(),
        "data": {"read": read, **(state.position or {}).get("tally", {})},
        "comparison": comparison,
        "best": best_record(best),
        "reference": dict(problem.reference),
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
    how, trained = "fine-tuned with LS-LoRA", "the adapter"
    if problem.config is None:
        how, trained = "trained", "the model"
    lead = f"{sum(sizes):,} parameters of {trained}; {read}.{best_words(best, trained)}"
    if experiment.optimizer == "kfac":
        lead += f" {labels_sentence(experiment.kfac.fisher)}"
    page = finetune_page(
        title=f"{experiment.model}, {how} on {experiment.data}",
        lead=lead,
        records=records,
        comparison=comparison,
        spectra=spectra,
        capacity=curvature.capacity if curvature else None,
        coverage=coverage,
        config=config,
        versions=software,
        nonlinearity=problem.config.nonlinearity if problem.config else "fourier",
        reference=problem.reference,
        trained=trained,
        stages=stages,
        host_memory=metrics["host_memory"],
    )
    write_text(output / "report.html", page, "the report")
    return {
        "steps": len(records.losses),
        "data": read,
        "loss": records.mean_losses,
        "validation_loss": {x.step: x.loss for x in records.exams if x.loss is not None},
        "reference": dict(problem.reference),
        "accuracy": {exam.step: exam.accuracy for exam in records.exams if exam.accuracy},
        "scores": {exam.step: exam.scores for exam in records.exams if exam.scores},
        "comparison": comparison,
        "best": best_record(best),
        "samples_per_second": records.samples_per_second,
        "tokens_per_second": records.tokens_per_second,
        "devices": devices,
        "report": str(output / "report.html"),
        "metrics": str(output / "metrics.json"),
        "checkpoint": str(find_checkpoint(output / "checkpoints")),
    }


def best_record(best: ExamRecord | None) -> dict[str, Any] | None:
    """The evaluation whose state was saved, for the metrics."""
    return None if best is None else {"step": best.step, "loss": best.loss}


def best_words(best: ExamRecord | None, trained: str) -> str:
    """The evaluation whose state was saved, as a sentence of the report."""
    if best is None:
        return ""
    return (
        f" What is saved is {trained} of update {best.step}, which has the lowest validation loss."
    )
