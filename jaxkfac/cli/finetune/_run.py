"""`jaxkfac finetune`: load, examine, train, examine again, and write what the run has to show."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

import jaxkfac as jk
from jaxkfac.cli._checkpoint import (
    DATA_CRC,
    Checkpoint,
    as_config,
    check_output,
    find_checkpoint,
    flatten_state,
    load_checkpoint,
    restore_state,
    save_checkpoint,
    write_whole,
)
from jaxkfac.cli._phases import phase
from jaxkfac.cli._progress import progress
from jaxkfac.cli.finetune._curvature import (
    AdapterCurvature,
    adapter_coverage,
    adapter_curvature,
    resolve_pattern,
)
from jaxkfac.cli.finetune._exam import Examiner, compare_exams
from jaxkfac.cli.finetune._load import load_model, load_text
from jaxkfac.cli.finetune._loggers import MetricLogger, check_loggers, open_loggers
from jaxkfac.cli.finetune._loop import TuneState, tune
from jaxkfac.cli.finetune._options import FinetuneArguments
from jaxkfac.cli.finetune._problem import (
    Problem,
    build_optimizer,
    build_problem,
    total_updates,
)
from jaxkfac.interception._paths import leaves_by_path
from jaxkfac.memory import bytes_text
from jaxkfac.memory._resident import resident_bytes
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
    experiment, output = arguments.experiment, arguments.output
    folder = output / "checkpoints"
    _check(arguments)
    check_output(output, [folder], resume=arguments.resume, overwrite=arguments.overwrite)
    console = Console(stderr=True)
    with jk.memory.track("run") as stages:
        with phase("reading the data"):
            text = load_text(experiment)
        with jk.memory.track("load the model"), phase("loading the model"):
            problem = build_problem(experiment, load_model(experiment), text)
        console.print(f"data: {problem.encoded}", highlight=False)
        coverage = adapter_coverage(problem)
        pattern = arguments.curvature
        if pattern is not None:
            pattern = resolve_pattern(pattern, coverage)
        with jk.memory.track("train"), phase("training"):
            state = _train(arguments, problem, folder)
        curvature = None
        if pattern is not None:
            with jk.memory.track("curvature of the adapter"), phase("measuring curvature"):
                curvature = adapter_curvature(problem, experiment, state.adapters, pattern)
    chosen = experiment.adapter
    dialect = "peft" if chosen.fourier_placement == "none" else chosen.dialect
    saved = (state.adapters, problem.config)
    if chosen.split:
        saved = jk.lslora.split(*saved, problem.pretrained.config.parts)
    with phase("writing adapter and report"):
        jk.lslora.save(output / "adapter", *saved, dialect=dialect)
        summary = _write_results(arguments, problem, state.records, curvature, coverage, stages)
    if arguments.json:
        print(json.dumps(summary))
        return
    console = Console()
    console.print(finetune_table(state.records, summary["comparison"]))
    console.print(f"adapter: {output / 'adapter'}", soft_wrap=True, highlight=False)
    console.print(f"report: {output / 'report.html'}", soft_wrap=True, highlight=False)


def _check(arguments: FinetuneArguments) -> None:
    for name in ("checkpoint_every", "evaluate_every", "diagnose_every", "sample_tokens"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
    if arguments.samples < 0:
        raise ValueError(f"samples must not be negative, not {arguments.samples}")
    check_loggers(arguments.log)


def _train(arguments: FinetuneArguments, problem: Problem, folder: Path) -> TuneState:
    """From the checkpoint, or from the start, to the end.

    A Ctrl-C writes a checkpoint of the last finished update before it goes on its way.
    """
    experiment = arguments.experiment
    total, options = total_updates(experiment, problem), as_config(experiment)
    config = options | {DATA_CRC: problem.data_crc}
    tx = build_optimizer(experiment, problem, total)
    adapters = problem.adapters
    state = TuneState(adapters, tx.init(adapters), 0, FinetuneRecords())
    if arguments.resume and find_checkpoint(folder):
        stored = load_checkpoint(folder)
        adapters, optimizer = restore_state(stored, adapters, state.optimizer, config)
        records = FinetuneRecords.from_plain(stored.records)
        state = TuneState(adapters, optimizer, stored.step, records)
    if state.step == total:
        return state

    def save(state: TuneState) -> None:
        leaves = flatten_state(state.adapters, state.optimizer)
        plain = state.records.to_plain()
        checkpoint = Checkpoint(leaves, config, experiment.optimizer, plain, state.step)
        save_checkpoint(folder, checkpoint)

    logger = open_loggers(arguments.log, arguments.output, config=options, step=state.step)
    watch = _Watch(arguments, problem, logger, total)
    latest = [state]
    try:
        if state.step == 0:
            with phase("examining"):
                state = watch(state)
        with progress("finetune", total, start=state.step) as advance:

            def each_update(state: TuneState) -> TuneState:
                advance(state.step, _words(state.records))
                with phase("examining"):
                    latest[0] = state = watch(state)
                if state.step % arguments.checkpoint_every == 0 or state.step == total:
                    save(state)
                return state

            return tune(experiment, problem, tx, state, total=total, each_update=each_update)
    except KeyboardInterrupt:
        if latest[0].step:
            save(latest[0])
        raise
    finally:
        logger.close()


class _Watch:
    """Examines the states whose turn it is, and hands numbers to the logger."""

    def __init__(
        self, arguments: FinetuneArguments, problem: Problem, logger: MetricLogger, total: int
    ) -> None:
        self._arguments, self._logger, self._total = arguments, logger, total
        self._examiner = Examiner(problem, arguments.experiment)

    def __call__(self, state: TuneState) -> TuneState:
        step, records, asked = state.step, state.records, self._arguments
        end = step in (0, self._total)
        if step:
            self._logger.numbers(step, _numbers(records))
        if end or step % asked.diagnose_every == 0:
            fourier = self._examiner.fourier(step, state.adapters)
            if fourier is not None:
                records = records._replace(fourier=[*records.fourier, fourier])
                for layer, values in fourier.layers.items():
                    names = ("sigma", "deviation", "nonlinearity", "saturated")
                    means = {f"{name}/{layer}": float(np.mean(values[name])) for name in names}
                    self._logger.numbers(step, means)
        if end or (asked.evaluate_every and step % asked.evaluate_every == 0):
            exam = self._examiner.exam(step, state.adapters)
            if exam is not None:
                records = records._replace(exams=[*records.exams, exam])
                found = {f"accuracy/{k}": ends[0] for k, ends in exam.accuracy.items()}
                if exam.loss is not None:
                    found["loss/validation"] = exam.loss
                self._logger.numbers(step, found)
        if end and asked.samples:
            samples = self._examiner.samples(
                step, state.adapters, count=asked.samples, tokens=asked.sample_tokens
            )
            records = records._replace(samples=[*records.samples, *samples])
            for number, sample in enumerate(samples):
                self._logger.text(step, f"sample/{number}", f"{sample.prompt} → {sample.answer}")
        return state._replace(records=records)


def _numbers(records: FinetuneRecords) -> dict[str, float]:
    """Of the last update."""
    return {
        "loss/train": records.losses[-1],
        "loss/penalty": records.penalties[-1],
        "tokens_per_second": records.tokens[-1] / records.seconds[-1],
        "memory_bytes": float(_memory() or 0),
        "skipped": float(records.skipped),
    }


def _words(records: FinetuneRecords) -> str:
    held = _memory()
    memory = "" if held is None else f"  {bytes_text(held)}"
    return f"loss {records.losses[-1]:.4f}  {records.tokens_per_second:,.0f} tokens/s{memory}"


def _memory() -> int | None:
    """Bytes in use on the first device, or of main memory where devices do not count."""
    stats = jax.local_devices()[0].memory_stats()
    return stats["bytes_in_use"] if stats else resident_bytes()


def _write_results(
    arguments: FinetuneArguments,
    problem: Problem,
    records: FinetuneRecords,
    curvature: AdapterCurvature | None,
    coverage: list[CoverageRow],
    stages: jk.memory.Stage,
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
        "memory": stages.to_dict(),
    }
    output.mkdir(parents=True, exist_ok=True)
    write_whole(output / "metrics.json", json.dumps(metrics, indent=1, allow_nan=False))
    sizes = [int(np.size(x)) for x in leaves_by_path(problem.adapters).values()]
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
        stages=stages,
    )
    write_whole(output / "report.html", page)
    return {
        "steps": len(records.losses),
        "loss": [mean_loss(records.losses, last=last) for last in (False, True)],
        "accuracy": {exam.step: exam.accuracy for exam in records.exams if exam.accuracy},
        "comparison": comparison,
        "tokens_per_second": records.tokens_per_second,
        "adapter": str(output / "adapter"),
        "report": str(output / "report.html"),
        "metrics": str(output / "metrics.json"),
        "checkpoint": str(find_checkpoint(output / "checkpoints")),
    }
