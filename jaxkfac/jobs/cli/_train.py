"""`jaxkfac train`: both optimizers on the same examples, checkpoints, report."""

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import optax
from rich.console import Console

import jaxkfac as jk
from jaxkfac._arguments import ArrayTree, leaves_by_path
from jaxkfac._text import number
from jaxkfac.files import write_text
from jaxkfac.jobs.cli._checkpoint import (
    Checkpoint,
    CheckpointWriter,
    as_config,
    check_output,
    checkpoint_writer,
    existing_run,
    flatten_state,
    is_whole,
    load_checkpoint,
    remove_checkpoints,
    restore_state,
    say_nothing_saved,
)
from jaxkfac.jobs.cli._devices import ONE_DEVICE, RunDevices, devices_line, run_devices
from jaxkfac.jobs.cli._interrupts import nothing_begun
from jaxkfac.jobs.cli._loop import TrainedState, total_updates, train, updates_per_epoch
from jaxkfac.jobs.cli._options import (
    Experiment,
    Optimizer,
    TrainArguments,
    check_least,
    labels_sentence,
)
from jaxkfac.jobs.cli._paths import find_checkpoint
from jaxkfac.jobs.cli._problem import DigitsProblem, build_optimizer, digits_problem, find_layers
from jaxkfac.jobs.cli._processes import RunProcesses, run_processes
from jaxkfac.jobs.cli._progress import (
    check_held_once,
    host_memory,
    phase,
    progress,
    said_if_slow,
    time_left,
)
from jaxkfac.jobs.report import (
    RunRecords,
    SpectrumRecord,
    coverage_rows,
    race_record,
    race_sentence,
    report_page,
    runs_table,
    seeds_page,
    seeds_record,
    seeds_table,
    spectrum_records,
    versions,
)
from jaxkfac.optim import KfacState

# ---------------- one optimizer, from its checkpoint or the start to the end


def train_one(
    name: Optimizer,
    problem: DigitsProblem,
    arguments: TrainArguments,
    devices: RunDevices = ONE_DEVICE,
) -> TrainedState:
    """Train with one optimizer from its checkpoint, or from the start, to the end.

    Ctrl-C waits for the current epoch and writes a checkpoint of it before it takes effect. A
    second Ctrl-C leaves no state; the last checkpoint then counts.

    Raises:
        HeldTwiceError: parameters or optimizer state are in memory twice.
        OSError: a checkpoint could not be written; raised at the end of the next epoch, or here.
    """
    experiment, folder = arguments.experiment, arguments.output / name
    processes = devices.processes
    total, config = total_updates(experiment, problem), as_config(experiment)
    tx = build_optimizer(name, experiment, problem, total, distribute=devices.divides)
    earlier = jax.live_arrays()
    doing = f"{name}: preparing the model and the optimizer"
    with (
        processes.together(f"looking for a checkpoint in {folder}") as shared_values,
        said_if_slow(doing, quiet=not processes.first),
    ):
        state = _start(problem, tx, folder if arguments.resume else None, config)
        shared_values.append(state.step)
    if devices.mesh is not None:
        placed = devices.put((state.params, state.optimizer))
        state = state._replace(params=placed[0], optimizer=placed[1])
        del placed
    if state.step == total:
        return state
    check_held_once(earlier, params=state.params, optimizer=state.optimizer)
    del earlier
    with checkpoint_writer() as writer, processes.stopping_together(), devices.set():
        return _train_to_the_end(
            name, problem, tx, state, arguments, config, devices=devices, writer=writer
        )


def _train_to_the_end(
    name: Optimizer,
    problem: DigitsProblem,
    tx: optax.GradientTransformationExtraArgs,
    state: TrainedState,
    arguments: TrainArguments,
    config: dict[str, Any],
    *,
    devices: RunDevices,
    writer: CheckpointWriter,
) -> TrainedState:
    experiment, folder = arguments.experiment, arguments.output / name
    processes, total = devices.processes, total_updates(experiment, problem)
    every = arguments.checkpoint_every * updates_per_epoch(experiment, problem)

    def save(state: TrainedState) -> None:
        leaves = flatten_state(state.params, state.optimizer, keep=processes.first)
        if processes.first:
            records = state.records.to_plain()
            writer.save(folder, Checkpoint(leaves, config, name, records, state.step))

    first, latest = state.step, [state]
    with progress(name, total, start=state.step, quiet=not processes.first) as shown:

        def each_epoch(state: TrainedState) -> None:
            before, latest[0] = latest[0], state
            last = state.records.epochs[-1]
            shown.advance(state.step, _epoch_text(state.records))
            if before.step == first and state.step < total:
                spent = last.seconds - sum(x.seconds for x in before.records.epochs[-1:])
                shown.say(time_left(spent / (state.step - first), total - state.step))
            if state.step % every == 0 or state.step == total:
                save(state)
            if state.step == total:
                writer.wait()
            processes.pause(state.step, writer.error)

        try:
            return train(
                name, experiment, problem, tx, state, each_epoch=each_epoch, devices=devices
            )
        except KeyboardInterrupt:
            is_complete = is_whole(latest[0].params, latest[0].optimizer)
            if is_complete and processes.stop_together:
                save(latest[0])
            else:
                writer.wait()  # a checkpoint may still be being written
                say_nothing_saved(folder)
            raise


def _epoch_text(records: RunRecords) -> str:
    """What the log says of the last epoch; settings are chosen by it, so it has no test images."""
    last = records.epochs[-1]
    text = f"loss {last.train_loss:.4f}  validation {last.validation_accuracy:.2%}"
    text += "".join(f"  rate {rate:.2g}" for rate in records.learning_rates[-1:])
    return f"{text}  gradient {number(records.gradient_norms[-1])}"


def _start(
    problem: DigitsProblem,
    tx: optax.GradientTransformationExtraArgs,
    folder: Path | None,
    config: dict[str, Any],
) -> TrainedState:
    """The state from the checkpoint in ``folder``, or a new one without a checkpoint."""
    if folder is not None and find_checkpoint(folder):
        stored = load_checkpoint(folder)
        template = jax.eval_shape(tx.init, problem.shapes)
        params, optimizer = restore_state(stored, problem.shapes, template, config)
        return TrainedState(params, optimizer, stored.step, RunRecords.from_plain(stored.records))
    params = problem.initial()
    return TrainedState(params, tx.init(params), 0, RunRecords([], []))


# ---------------- the command


def run_train(arguments: TrainArguments) -> None:
    """Train, write the results, and print the summary.

    With several seeds, each run has its own folder, and one more page summarizes all of them.
    """
    check_least(arguments, 1, "seeds")
    with run_processes(arguments) as processes:
        if arguments.seeds == 1:
            summary, runs, devices = _run(arguments, processes, begins=nothing_begun())
            if processes.first:
                _print(arguments, summary, runs, devices)
            return
        summaries, runs_by_seed = {}, []
        for seed in range(arguments.experiment.seed, arguments.experiment.seed + arguments.seeds):
            begins = contextlib.nullcontext() if runs_by_seed else nothing_begun()
            summary, runs, _ = _run(_of_seed(arguments, seed), processes, begins=begins)
            summaries[str(seed)] = summary
            runs_by_seed.append(runs)
        if processes.first:
            _write_seeds(arguments, summaries, runs_by_seed)


def _of_seed(arguments: TrainArguments, seed: int) -> TrainArguments:
    experiment = dataclasses.replace(arguments.experiment, seed=seed)
    output = arguments.output / f"seed-{seed}"
    return dataclasses.replace(arguments, experiment=experiment, output=output)


def _write_seeds(
    arguments: TrainArguments, summaries: dict[str, Any], runs_by_seed: list[dict[str, RunRecords]]
) -> None:
    runs = {name: [one[name] for one in runs_by_seed] for name in runs_by_seed[0]}
    page, measured = (arguments.output / name for name in ("report.html", "metrics.json"))
    text = seeds_page(runs, folders={seed: f"seed-{seed}/report.html" for seed in summaries})
    write_text(page, text, "the report")
    record = {"seeds": [int(seed) for seed in summaries], **seeds_record(runs)}
    plain = json.dumps(record, indent=1, allow_nan=False)
    write_text(measured, plain, "the measurements of the runs")
    if arguments.json:
        files = {"report": str(page), "metrics": str(measured)}
        print(json.dumps(record | {"seeds": summaries} | files))
        return
    console = Console()
    console.print(race_sentence(runs), highlight=False)
    console.print(seeds_table(runs))
    console.print(f"report: {page}", soft_wrap=True, highlight=False)


def _run(
    arguments: TrainArguments,
    processes: RunProcesses,
    *,
    begins: contextlib.AbstractContextManager[None],
) -> tuple[dict[str, Any], dict[str, RunRecords], RunDevices]:
    summary: dict[str, Any] = {}
    experiment, output = arguments.experiment, arguments.output
    names: tuple[Optimizer, ...] = (
        ("kfac", "adamw") if arguments.optimizer == "both" else (arguments.optimizer,)
    )
    with begins, processes.together("looking at the output folder"):
        folders = _check(arguments, names, writes=processes.first)
        devices = run_devices(arguments, processes)
    if arguments.overwrite and processes.first:
        for folder in folders:
            remove_checkpoints(folder)
    finals, spectra = {}, []
    with jk.memory.track("run") as stages:
        loading = processes.together("loading data and model")
        with (
            jk.memory.track("data and model"),
            phase("loading data and model"),
            said_if_slow("train: loading data and model", quiet=not processes.first),
            loading,
        ):
            problem = digits_problem(experiment)
            problem = problem.with_data(devices.replicated(problem.data))
        for name in names:
            with jk.memory.track(f"train with {name}"), phase(f"training with {name}"):
                finals[name] = train_one(name, problem, arguments, devices)
        if "kfac" in finals:
            with (
                jk.memory.track("decompose the factors"),
                phase("decomposing the factors"),
                said_if_slow("train: decomposing the factors", quiet=not processes.first),
            ):
                spectra = spectra_of(finals["kfac"].optimizer, experiment)
    runs = {name: state.records for name, state in finals.items()}
    device_use = {name: devices.described((x.params, x.optimizer)) for name, x in finals.items()}
    with phase("writing the report"), processes.together("writing the report"):
        if processes.first:
            summary = _write_results(output, experiment, problem, runs, spectra, stages, device_use)
    return summary, runs, devices


def _print(
    arguments: TrainArguments,
    summary: dict[str, Any],
    runs: dict[str, RunRecords],
    devices: RunDevices,
) -> None:
    if arguments.json:
        print(json.dumps(summary))
        return
    console = Console()
    console.print(summary["to_target"]["sentence"], highlight=False)
    console.print(runs_table(runs))
    if devices.mesh is not None:
        for name, run in runs.items():
            line = devices_line(name, run.samples_per_second, summary["devices"][name])
            console.print(line, highlight=False)
    console.print(f"report: {summary['report']}", soft_wrap=True, highlight=False)


def factor_average(optimizer_state: ArrayTree) -> Any:
    """The running average of the factors inside an optimizer's state, or ``None``."""
    states = jax.tree.leaves(optimizer_state, is_leaf=lambda x: isinstance(x, KfacState))
    return next((s.average for s in states if isinstance(s, KfacState)), None)


def spectra_of(optimizer_state: ArrayTree, experiment: Experiment) -> list[SpectrumRecord]:
    """Spectra of the factor average, clipped as in the run."""
    average, kappa = factor_average(optimizer_state), experiment.kfac.max_condition
    bases = jk.eigendecompose(average, max_condition=kappa, placement="host", vectors=False)
    return spectrum_records(bases)


def _check(arguments: TrainArguments, names: tuple[Optimizer, ...], *, writes: bool) -> list[Path]:
    """Check the options; return the folders of the checkpoints."""
    check_least(arguments, 1, "checkpoint_every")
    folders = [arguments.output / name for name in names]
    check_output(arguments, existing_run(folders), writes=writes)
    return folders


def _write_results(
    output: Path,
    experiment: Experiment,
    problem: DigitsProblem,
    runs: dict[str, RunRecords],
    spectra: list[SpectrumRecord],
    stages: jk.memory.Stage,
    devices: dict[str, Any],
) -> dict[str, Any]:
    sizes = {path: int(leaf.size) for path, leaf in leaves_by_path(problem.shapes).items()}
    coverage = coverage_rows(find_layers(problem), sizes)
    config = as_config(experiment)
    to_target = race_record({name: [run] for name, run in runs.items()})
    metrics = {
        "config": config,
        "versions": versions(),
        "to_target": to_target,
        "runs": {name: run.to_plain() for name, run in runs.items()},
        "spectra": [record._asdict() for record in spectra],
        "coverage": [row._asdict() for row in coverage],
        "samples_per_second": {name: run.samples_per_second for name, run in runs.items()},
        "devices": devices,
        "host_memory": host_memory(stages),
        "memory": stages.to_dict(),
    }
    output.mkdir(parents=True, exist_ok=True)
    text = json.dumps(metrics, indent=1, allow_nan=False)
    write_text(output / "metrics.json", text, "the measurements of the run")
    page = report_page(
        title="A vision transformer on handwritten digits",
        lead=f"{sum(sizes.values()):,} parameters, {len(problem.train.labels)} training, "
        f"{len(problem.validation.labels)} validation and {len(problem.test.labels)} test images "
        f"of 8 × 8 pixels.{' ' + labels_sentence(experiment.fisher) if 'kfac' in runs else ''}",
        runs=runs,
        spectra=spectra,
        coverage=coverage,
        config=config,
        versions=metrics["versions"],
        stages=stages,
        host_memory=metrics["host_memory"],
        num_test=len(problem.test.labels),
    )
    write_text(output / "report.html", page, "the report")
    finals = {name: run.epochs[-1]._asdict() for name, run in runs.items()}
    for name, run in runs.items():
        finals[name] |= {"compile_seconds": run.compile_seconds, "skipped": run.skipped}
    return {
        "seed": experiment.seed,
        "to_target": to_target,
        "final": finals,
        "devices": devices,
        "report": str(output / "report.html"),
        "metrics": str(output / "metrics.json"),
        "checkpoints": {name: str(find_checkpoint(output / name)) for name in runs},
    }
