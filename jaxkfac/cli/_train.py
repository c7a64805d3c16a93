"""`jaxkfac train`: both optimizers on the same examples, checkpoints, report."""

import json
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

import jaxkfac as jk
from jaxkfac.cli._checkpoint import (
    Checkpoint,
    check_output,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
    say_nothing_saved,
)
from jaxkfac.cli._devices import ONE_DEVICE, RunDevices, devices_line, run_devices
from jaxkfac.cli._held_once import check_held_once
from jaxkfac.cli._host_memory import host_memory
from jaxkfac.cli._loop import TrainState, total_updates, train, updates_per_epoch
from jaxkfac.cli._optimizers import Optimizer
from jaxkfac.cli._options import Experiment, TrainArguments
from jaxkfac.cli._phases import phase
from jaxkfac.cli._problem import DigitsProblem, build_optimizer, digits_problem, find_layers
from jaxkfac.cli._progress import progress, time_left
from jaxkfac.cli._run_state import as_config, flatten_state, is_whole, restore_state
from jaxkfac.files import write_text
from jaxkfac.interception import leaves_by_path
from jaxkfac.optim import KfacState
from jaxkfac.report import (
    RunRecords,
    SpectrumRecord,
    coverage_rows,
    report_page,
    runs_table,
    spectrum_records,
    versions,
)

PyTree = Any


def run_train(arguments: TrainArguments) -> None:
    """Train, write what the run has to show, and print the summary."""
    experiment, output = arguments.experiment, arguments.output
    names: tuple[Optimizer, ...] = (
        ("kfac", "adamw") if arguments.optimizer == "both" else (arguments.optimizer,)
    )
    _check(arguments, names)
    devices = run_devices(arguments.devices, arguments.mesh, batch_size=experiment.batch_size)
    finals, spectra = {}, []
    with jk.memory.track("run") as stages:
        with jk.memory.track("data and model"), phase("loading data and model"):
            problem = digits_problem(experiment)
            data = devices.whole((problem.train, problem.test))
            problem = problem._replace(train=data[0], test=data[1])
            del data
        for name in names:
            with jk.memory.track(f"train with {name}"), phase(f"training with {name}"):
                finals[name] = train_one(name, problem, arguments, devices)
        if "kfac" in finals:
            with jk.memory.track("decompose the factors"), phase("decomposing the factors"):
                spectra = spectra_of(finals["kfac"].optimizer, experiment)
    runs = {name: state.records for name, state in finals.items()}
    with phase("writing the report"):
        summary = _write_results(output, experiment, problem, runs, spectra, stages)
    kept = {name: devices.described((x.params, x.optimizer)) for name, x in finals.items()}
    summary["devices"] = kept
    if arguments.json:
        print(json.dumps(summary))
        return
    console = Console()
    console.print(runs_table(runs))
    if devices.mesh is not None:
        for name, run in runs.items():
            console.print(devices_line(name, run.samples_per_second, kept[name]), highlight=False)
    console.print(f"report: {output / 'report.html'}", soft_wrap=True, highlight=False)


def train_one(
    name: Optimizer,
    problem: DigitsProblem,
    arguments: TrainArguments,
    devices: RunDevices = ONE_DEVICE,
) -> TrainState:
    """One optimizer from its checkpoint, or from the start, to the end.

    A Ctrl-C waits for the epoch that is under way, and writes a checkpoint of it before it
    goes on. A second one leaves no state behind: then the last checkpoint counts.

    Raises:
        HeldTwiceError: parameters or optimizer state are in memory twice.
    """
    experiment, folder = arguments.experiment, arguments.output / name
    total, config = total_updates(experiment, problem), as_config(experiment)
    tx = build_optimizer(name, experiment, problem, total, distribute=devices.divides)
    earlier = jax.live_arrays()
    state = _start(problem, tx, folder if arguments.resume else None, config)
    if devices.mesh is not None:
        placed = devices.put((state.params, state.optimizer))
        state = state._replace(params=placed[0], optimizer=placed[1])
        del placed
    if state.step == total:
        return state
    check_held_once(earlier, params=state.params, optimizer=state.optimizer)
    del earlier
    every = arguments.checkpoint_every * updates_per_epoch(experiment, problem)

    def save(state: TrainState) -> None:
        leaves = flatten_state(state.params, state.optimizer)
        records = state.records.to_plain()
        save_checkpoint(folder, Checkpoint(leaves, config, name, records, state.step))

    first, latest = state.step, [state]
    with progress(name, total, start=state.step) as shown:

        def each_epoch(state: TrainState) -> None:
            before, latest[0] = latest[0], state
            last = state.records.epochs[-1]
            shown.advance(state.step, f"loss {last.train_loss:.4f}  test {last.test_accuracy:.2%}")
            if before.step == first and state.step < total:
                spent = last.seconds - sum(x.seconds for x in before.records.epochs[-1:])
                shown.say(time_left(spent / (state.step - first), total - state.step))
            if state.step % every == 0 or state.step == total:
                save(state)

        try:
            with devices.set():
                return train(
                    name, experiment, problem, tx, state, each_epoch=each_epoch, devices=devices
                )
        except KeyboardInterrupt:
            if is_whole(latest[0].params, latest[0].optimizer):
                save(latest[0])
            else:
                say_nothing_saved(folder)
            raise


def _start(
    problem: DigitsProblem, tx: Any, folder: Path | None, config: dict[str, Any]
) -> TrainState:
    """From the checkpoint in ``folder``, if there is one, or from the beginning."""
    if folder is not None and find_checkpoint(folder):
        stored = load_checkpoint(folder)
        template = jax.eval_shape(tx.init, problem.shapes)
        params, optimizer = restore_state(stored, problem.shapes, template, config)
        return TrainState(params, optimizer, stored.step, RunRecords.from_plain(stored.records))
    params = problem.initial()
    return TrainState(params, tx.init(params), 0, RunRecords([], []))


def factor_average(optimizer_state: PyTree) -> Any:
    """The running average of the factors inside an optimizer's state, or ``None``."""
    states = jax.tree.leaves(optimizer_state, is_leaf=lambda x: isinstance(x, KfacState))
    return next((s.average for s in states if isinstance(s, KfacState)), None)


def spectra_of(
    optimizer_state: PyTree, experiment: Experiment, max_condition: float | None = None
) -> list[SpectrumRecord]:
    """Spectra of the factor average, clipped as in the run or at ``max_condition``."""
    bases = jk.eigendecompose(
        factor_average(optimizer_state),
        max_condition=experiment.kfac.max_condition if max_condition is None else max_condition,
        placement="host",
        vectors=False,
    )
    return spectrum_records(bases)


def _check(arguments: TrainArguments, names: tuple[Optimizer, ...]) -> None:
    if arguments.checkpoint_every < 1:
        raise ValueError(f"checkpoint_every must be at least 1, not {arguments.checkpoint_every}")
    check_output(
        arguments.output,
        [arguments.output / name for name in names],
        resume=arguments.resume,
        overwrite=arguments.overwrite,
    )


def _write_results(
    output: Path,
    experiment: Experiment,
    problem: DigitsProblem,
    runs: dict[str, RunRecords],
    spectra: list[SpectrumRecord],
    stages: jk.memory.Stage,
) -> dict[str, Any]:
    sizes = {path: int(leaf.size) for path, leaf in leaves_by_path(problem.shapes).items()}
    coverage = coverage_rows(find_layers(problem), sizes)
    config = as_config(experiment)
    metrics = {
        "config": config,
        "versions": versions(),
        "runs": {name: run.to_plain() for name, run in runs.items()},
        "spectra": [record._asdict() for record in spectra],
        "coverage": [row._asdict() for row in coverage],
        "samples_per_second": {name: run.samples_per_second for name, run in runs.items()},
        "host_memory": host_memory(stages),
        "memory": stages.to_dict(),
    }
    output.mkdir(parents=True, exist_ok=True)
    text = json.dumps(metrics, indent=1, allow_nan=False)
    write_text(output / "metrics.json", text, "the measurements of the run")
    page = report_page(
        title="A vision transformer on handwritten digits",
        lead=f"{sum(sizes.values()):,} parameters, {len(problem.train.labels)} training and "
        f"{len(problem.test.labels)} held-out images of 8 × 8 pixels.",
        runs=runs,
        spectra=spectra,
        coverage=coverage,
        config=config,
        versions=metrics["versions"],
        stages=stages,
        host_memory=metrics["host_memory"],
    )
    write_text(output / "report.html", page, "the report")
    finals = {name: run.epochs[-1]._asdict() for name, run in runs.items()}
    for name, run in runs.items():
        finals[name] |= {"compile_seconds": run.compile_seconds, "skipped": run.skipped}
    return {
        "seed": experiment.seed,
        "final": finals,
        "report": str(output / "report.html"),
        "metrics": str(output / "metrics.json"),
        "checkpoints": {name: str(find_checkpoint(output / name)) for name in runs},
    }
