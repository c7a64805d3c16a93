"""The loop of a fine-tuning run: update by update, each a pure function of the state.

An update reads the batches of its number, so a run that was stopped and resumed gives the same
bits as one that was not.
"""

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxkfac.cli._loop import NonFiniteLossError, skipped_updates
from jaxkfac.cli.finetune._options import Finetuning
from jaxkfac.cli.finetune._problem import Problem, micro_batches
from jaxkfac.cli.finetune._step import MicroStep
from jaxkfac.report import FinetuneRecords

PyTree = Any


class TuneState(NamedTuple):
    """What one update hands to the next; ``records`` only grows."""

    adapters: PyTree
    optimizer: PyTree
    step: int
    records: FinetuneRecords


def tune(
    experiment: Finetuning,
    problem: Problem,
    tx: Any,
    state: TuneState,
    *,
    total: int,
    each_update: Callable[[TuneState], TuneState],
) -> TuneState:
    """Run from ``state`` to update ``total``.

    ``each_update`` sees the state after every update and returns it, with more in its records
    if it likes. Buffers are not donated: when a Ctrl-C arrives in the middle of an update, the
    state that was handed over last is still there.

    Raises:
        NonFiniteLossError: naming the step whose loss was not finite.
    """
    micro_step = MicroStep(problem, experiment, tx)
    before = state.records.compile_seconds, state.records.programs
    while state.step < total:
        adapters, optimizer = state.adapters, state.optimizer
        tokens = learnt = 0
        loss = penalty = 0.0
        compiled, started = micro_step.compile_seconds, time.perf_counter()
        numbers = micro_batches(experiment, problem, state.step)
        for number in numbers:
            batch = problem.train.at(number)
            adapters, optimizer, value, pull = micro_step(adapters, optimizer, batch, number)
            loss += float(value) * batch.num_terms
            penalty += float(pull) / len(numbers)
            tokens, learnt = tokens + batch.num_tokens, learnt + batch.num_terms
        jax.block_until_ready(adapters)
        seconds = time.perf_counter() - started - (micro_step.compile_seconds - compiled)
        loss /= max(learnt, 1)
        if not (math.isfinite(loss) and math.isfinite(penalty)):
            raise NonFiniteLossError(_explain(experiment, state.step, loss))
        records = state.records
        records = records._replace(
            losses=[*records.losses, loss],
            penalties=[*records.penalties, penalty],
            tokens=[*records.tokens, tokens],
            learnt=[*records.learnt, learnt],
            seconds=[*records.seconds, seconds],
            compile_seconds=before[0] + micro_step.compile_seconds,
            programs=before[1] + micro_step.programs,
            skipped=skipped_updates(optimizer),
        )
        state = each_update(TuneState(adapters, optimizer, state.step + 1, records))
    return state


def _explain(experiment: Finetuning, step: int, loss: float) -> str:
    name = experiment.optimizer
    rate = getattr(experiment, name).learning_rate
    return (
        f"the loss of {name} is {loss} at step {step}; the last checkpoint is from before. "
        f"Try --{name}.learning-rate {rate / 3:.2g}"
        + (f" or --kfac.damping {experiment.kfac.damping * 10:.2g}" if name == "kfac" else "")
    )
