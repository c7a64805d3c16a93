"""The training loop, from the start or from a checkpoint, to the end."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import optax

from jaxkfac._arguments import leaves_by_path
from jaxkfac.jobs.cli._checkpoint import (
    DATA_CRC,
    Checkpoint,
    CheckpointWriter,
    checkpoint_writer,
    flatten_state,
    load_checkpoint,
    restore_state,
    say_nothing_saved,
)
from jaxkfac.jobs.cli._interrupts import interrupts_deferred
from jaxkfac.jobs.cli._paths import find_checkpoint
from jaxkfac.jobs.cli._processes import RunProcesses
from jaxkfac.jobs.cli._progress import check_held_once, progress, said_if_slow, say, time_left
from jaxkfac.jobs.cli.finetune._loggers import open_loggers
from jaxkfac.jobs.cli.finetune._loop import TuneState, Tuning
from jaxkfac.jobs.cli.finetune._options import FinetuneArguments
from jaxkfac.jobs.cli.finetune._problem import (
    FinetuneProblem,
    build_optimizer,
    options_of,
    total_updates,
)
from jaxkfac.jobs.cli.finetune._watch import BestKept, Watch, best_folder, words_of
from jaxkfac.jobs.report import FinetuneRecords

_PAUSE_SECONDS = 10  # duration of updates between two checks for a signal, with several processes
_MEASURED = 3  # number of updates to estimate the remaining time; one more before them warms up


def train(
    arguments: FinetuneArguments,
    problem: FinetuneProblem,
    folder: Path,
    *,
    earlier: list[jax.Array],
) -> TuneState:
    """Run to the end, with checkpoints in ``folder``.

    With ``--evaluate-every`` the returned parameters are those of the best evaluation, and the
    records are those of the whole run.

    After a Ctrl-C the current update is completed and a checkpoint is written before the
    interrupt is raised. After a second one no checkpoint is written, and the last one remains.

    Args:
        arguments: Options of the command.
        problem: The problem to train.
        folder: Folder of the checkpoints.
        earlier: Arrays that existed before the command started.

    Raises:
        CheckpointMismatchError: the checkpoint belongs to another run.
        HeldTwiceError: the model, the adapter or the optimizer's state is in memory twice.
        NonFiniteLossError: a loss was not finite; names the first such update.
        OSError: a checkpoint could not be written; raised after the next update, or at the end.
        ValueError: ``--patience`` is used without validation records.
    """
    if arguments.patience is not None and problem.validation is None:
        raise ValueError("--patience needs records to validate with, and the data has none")
    experiment, processes = arguments.experiment, problem.devices.processes
    total, options = total_updates(experiment, problem), options_of(experiment, problem)
    config = options | {DATA_CRC: problem.data_crc}
    tx = build_optimizer(experiment, problem, total)
    doing = "finetune: preparing what is trained, and the optimizer"
    with (
        processes.together(f"looking for a checkpoint in {folder}") as shared_values,
        said_if_slow(doing, quiet=not processes.first),
    ):
        state = _start(problem, tx, folder if arguments.resume else None, config)
        shared_values.append(state.step)
    adapters, optimizer = problem.devices.replicated((state.adapters, state.optimizer))
    state = state._replace(adapters=adapters, optimizer=optimizer)
    del adapters, optimizer
    check_held_once(
        [*earlier, *_replaced(problem)],
        params=problem.params,
        adapters=state.adapters,
        optimizer=state.optimizer,
    )
    with processes.together("opening the loggers"):
        names = arguments.log if processes.first else ()
        logger = open_loggers(names, arguments.output, config=options, step=state.step)
    watch = Watch(arguments, problem.family.examiner(problem, arguments), logger, total)
    best = BestKept(arguments, problem, best_folder(folder))
    best.resumed(state.step)
    unread = min(arguments.log_every, total)
    run = Tuning(experiment, problem, tx, state, total=total, unread=unread, look=watch.look)
    del state  # its arrays are donated
    with (
        contextlib.closing(logger),
        checkpoint_writer() as writer,
        processes.stopping_together(),
    ):

        def save() -> None:
            best.saved(run.state.records)
            adapters, optimizer, step, records, position = run.state
            leaves = flatten_state(adapters, optimizer, keep=processes.first)
            if processes.first:
                plain = records.to_plain()
                optimized = experiment.optimizer
                checkpoint = Checkpoint(leaves, config, optimized, plain, step, position)
                writer.save(folder, checkpoint)

        _to_the_end(
            arguments, run, watch, best, writer, save, processes, folder=folder, total=total
        )
    return best.restored(run.state)


def _to_the_end(
    arguments: FinetuneArguments,
    run: Tuning,
    watch: Watch,
    best: BestKept,
    writer: CheckpointWriter,
    save: Callable[[], None],
    processes: RunProcesses,
    *,
    folder: Path,
    total: int,
) -> None:
    first = noted = run.state.step

    def examine() -> bool:
        """Evaluate if it is due, and return whether the run ends here."""
        run.state = watch.examine(run.state)
        best.keep(run.state)
        return run.state.step == total or best.stops(run.state.records)

    def read() -> None:
        nonlocal noted
        run.read()
        watch.note(run.state.records, noted)
        noted = run.state.step

    try:
        if processes.first and not first:
            say("finetune: examining what there is before the first update")
        if examine():
            return
        with progress("finetune", total, start=first, quiet=not processes.first) as shown:
            has_told_time = False
            pause_at, paused, since = first + 1, first, time.monotonic()
            for step in range(first + 1, total + 1):
                reads = watch.reads(step)
                with interrupts_deferred("finishing the update"):
                    run.update()
                    if reads:
                        read()
                shown.advance(step, words_of(run.state.records) if reads else None)
                if not has_told_time and len(run.seconds) > _MEASURED and step < total:
                    has_told_time = True
                    measured = sum(run.seconds[1 : _MEASURED + 1]) / _MEASURED
                    shown.say(time_left(measured, total - step))
                ends = examine() if reads else False
                if step % arguments.checkpoint_every == 0 or ends:
                    save()
                if ends:
                    writer.wait()
                # With several processes this waits for all of them, so it is done rarely.
                if reads or not processes.several or step >= pause_at:
                    processes.pause(step, writer.error)
                    seconds_each = processes.slowest((time.monotonic() - since) / (step - paused))
                    pause_at = step + max(1, int(_PAUSE_SECONDS / max(seconds_each, 1e-6)))
                    paused, since = step, time.monotonic()
                if ends:
                    break
    except KeyboardInterrupt:
        if not (run.is_complete and processes.stop_together):
            writer.wait()  # a checkpoint may still be being written
            say_nothing_saved(folder)
        elif run.state.step:
            read()
            save()
        raise


def _replaced(problem: FinetuneProblem) -> list[jax.Array]:
    """Base parameters that are trained in full; at the start both are equal."""
    base = leaves_by_path(problem.params)
    return [leaf for path, leaf in base.items() if path in problem.adapters]


def _start(
    problem: FinetuneProblem,
    tx: optax.GradientTransformationExtraArgs,
    folder: Path | None,
    config: dict[str, Any],
) -> TuneState:
    """The state of the checkpoint in ``folder``, if there is one, or the initial state."""
    if folder is not None and find_checkpoint(folder):
        stored = load_checkpoint(folder)
        template = jax.eval_shape(tx.init, problem.adapters)
        adapters, optimizer = restore_state(stored, problem.adapters, template, config)
        records = FinetuneRecords.from_plain(stored.records)
        return TuneState(adapters, optimizer, stored.step, records, stored.position)
    adapters = problem.initial()
    return TuneState(adapters, tx.init(adapters), 0, FinetuneRecords())
