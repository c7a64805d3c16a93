"""Training: from the checkpoint, or from the start, to the end."""

from pathlib import Path
from typing import Any

import jax

from jaxkfac.cli._checkpoint import (
    Checkpoint,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
    say_nothing_saved,
)
from jaxkfac.cli._held_once import check_held_once
from jaxkfac.cli._interrupts import interrupts_deferred
from jaxkfac.cli._progress import progress, time_left
from jaxkfac.cli._run_state import DATA_CRC, flatten_state, restore_state
from jaxkfac.cli.finetune._loggers import open_loggers
from jaxkfac.cli.finetune._loop import TuneState, Tuning
from jaxkfac.cli.finetune._options import OLDER, FinetuneArguments, Finetuning
from jaxkfac.cli.finetune._problem import (
    FinetuneProblem,
    build_optimizer,
    micro_batches,
    options_of,
    total_updates,
)
from jaxkfac.cli.finetune._watch import Watch, words_of
from jaxkfac.report import FinetuneRecords

_MEASURED = 3  # updates whose time says how long the run will take; the one before warms up


def train(
    arguments: FinetuneArguments,
    problem: FinetuneProblem,
    folder: Path,
    *,
    earlier: list[jax.Array],
) -> TuneState:
    """Run to the end, with checkpoints in ``folder``.

    A Ctrl-C waits for the update that is under way, and writes a checkpoint of it before it
    goes on. A second one leaves no state behind: then the last checkpoint counts.

    Args:
        arguments: What was asked for.
        problem: What is trained.
        folder: Of the checkpoints.
        earlier: Arrays that were there before the command began.

    Raises:
        CheckpointMismatchError: the checkpoint is of another run.
        HeldTwiceError: the model, the adapter or the optimizer's state is in memory twice.
        NonFiniteLossError: naming the first update whose loss was not finite.
    """
    experiment = arguments.experiment
    total, options = total_updates(experiment, problem), options_of(experiment, problem)
    config = options | {DATA_CRC: problem.data_crc}
    tx = build_optimizer(experiment, problem, total)
    state = _start(experiment, problem, tx, folder if arguments.resume else None, config)
    adapters, optimizer = problem.devices.whole((state.adapters, state.optimizer))
    state = state._replace(adapters=adapters, optimizer=optimizer)
    del adapters, optimizer
    check_held_once(
        earlier, params=problem.params, adapters=state.adapters, optimizer=state.optimizer
    )
    logger = open_loggers(arguments.log, arguments.output, config=options, step=state.step)
    watch = Watch(arguments, problem.family.examiner(problem, arguments), logger, total)
    unread = min(arguments.log_every, total)
    run = Tuning(experiment, problem, tx, state, total=total, unread=unread, look=watch.look)
    first, noted = state.step, state.step
    del state  # its arrays are donated

    def read() -> None:
        nonlocal noted
        run.read()
        watch.note(run.state.records, noted)
        noted = run.state.step

    def save() -> None:
        adapters, optimizer, step, records, position = run.state
        leaves, plain = flatten_state(adapters, optimizer), records.to_plain()
        save_checkpoint(
            folder, Checkpoint(leaves, config, experiment.optimizer, plain, step, position)
        )

    try:
        run.state = watch.examine(run.state)
        if first == total:
            return run.state
        with progress("finetune", total, start=first) as shown:
            said = False
            for step in range(first + 1, total + 1):
                reads = watch.reads(step)
                with interrupts_deferred("finishing the update"):
                    run.update()
                    if reads:
                        read()
                shown.advance(step, words_of(run.state.records) if reads else None)
                if not said and len(run.seconds) > _MEASURED and step < total:
                    said = True
                    measured = sum(run.seconds[1 : _MEASURED + 1]) / _MEASURED
                    shown.say(time_left(measured, total - step))
                if reads:
                    run.state = watch.examine(run.state)
                if step % arguments.checkpoint_every == 0 or step == total:
                    save()
        return run.state
    except KeyboardInterrupt:
        if not run.whole:
            say_nothing_saved(folder)
        elif run.state.step:
            read()
            save()
        raise
    finally:
        logger.close()


def _start(
    experiment: Finetuning,
    problem: FinetuneProblem,
    tx: Any,
    folder: Path | None,
    config: dict[str, Any],
) -> TuneState:
    """From the checkpoint in ``folder``, if there is one, or from the beginning."""
    if folder is not None and find_checkpoint(folder):
        stored = load_checkpoint(folder)
        template = jax.eval_shape(tx.init, problem.adapters)
        adapters, optimizer = restore_state(
            stored, problem.adapters, template, config, lacking=OLDER
        )
        records, position = FinetuneRecords.from_plain(stored.records), stored.position
        if position is None:  # of an older version, whose data were in memory
            position = {"batch": micro_batches(experiment, problem, stored.step).start}
        return TuneState(adapters, optimizer, stored.step, records, position)
    adapters = problem.initial()
    return TuneState(adapters, tx.init(adapters), 0, FinetuneRecords())
