"""One optimizer of `jaxkfac train`, from its checkpoint or from the start to the end."""

from pathlib import Path
from typing import Any

import jax

from jaxkfac._text import number
from jaxkfac.cli._checkpoint import (
    Checkpoint,
    find_checkpoint,
    load_checkpoint,
    say_nothing_saved,
)
from jaxkfac.cli._devices import ONE_DEVICE, RunDevices
from jaxkfac.cli._held_once import check_held_once
from jaxkfac.cli._loop import TrainState, total_updates, train, updates_per_epoch
from jaxkfac.cli._optimizers import Optimizer
from jaxkfac.cli._options import TrainArguments, older
from jaxkfac.cli._problem import DigitsProblem, build_optimizer
from jaxkfac.cli._progress import progress, time_left
from jaxkfac.cli._run_state import as_config, flatten_state, is_whole, restore_state
from jaxkfac.cli._writer import CheckpointWriter, checkpoint_writer
from jaxkfac.report import RunRecords


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
        OSError: a checkpoint could not be written; raised when the next epoch ends, or here.
    """
    experiment, folder = arguments.experiment, arguments.output / name
    processes = devices.processes
    total, config = total_updates(experiment, problem), as_config(experiment)
    tx = build_optimizer(name, experiment, problem, total, distribute=devices.divides)
    earlier = jax.live_arrays()
    with processes.together(f"looking for a checkpoint in {folder}") as same:
        state = _start(problem, tx, folder if arguments.resume else None, config)
        same.append(state.step)
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
    tx: Any,
    state: TrainState,
    arguments: TrainArguments,
    config: dict[str, Any],
    *,
    devices: RunDevices,
    writer: CheckpointWriter,
) -> TrainState:
    experiment, folder = arguments.experiment, arguments.output / name
    processes, total = devices.processes, total_updates(experiment, problem)
    every = arguments.checkpoint_every * updates_per_epoch(experiment, problem)

    def save(state: TrainState) -> None:
        leaves = flatten_state(state.params, state.optimizer, keep=processes.first)
        if processes.first:
            records = state.records.to_plain()
            writer.save(folder, Checkpoint(leaves, config, name, records, state.step))

    first, latest = state.step, [state]
    with progress(name, total, start=state.step, quiet=not processes.first) as shown:

        def each_epoch(state: TrainState) -> None:
            before, latest[0] = latest[0], state
            last = state.records.epochs[-1]
            told = f"loss {last.train_loss:.4f}  test {last.test_accuracy:.2%}"
            told += "".join(f"  rate {rate:.2g}" for rate in state.records.learning_rates[-1:])
            norm = number(state.records.gradient_norms[-1])
            shown.advance(state.step, f"{told}  gradient {norm}")
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
            whole = is_whole(latest[0].params, latest[0].optimizer)
            if whole and processes.stop_together:
                save(latest[0])
            else:
                writer.wait()  # the last one may be under way
                say_nothing_saved(folder)
            raise


def _start(
    problem: DigitsProblem, tx: Any, folder: Path | None, config: dict[str, Any]
) -> TrainState:
    """From the checkpoint in ``folder``, if there is one, or from the beginning."""
    if folder is not None and find_checkpoint(folder):
        stored = load_checkpoint(folder)
        template = jax.eval_shape(tx.init, problem.shapes)
        params, optimizer = restore_state(
            stored, problem.shapes, template, config, lacking=older(stored.config)
        )
        return TrainState(params, optimizer, stored.step, RunRecords.from_plain(stored.records))
    params = problem.initial()
    return TrainState(params, tx.init(params), 0, RunRecords([], []))
