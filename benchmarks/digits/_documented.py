"""The optimizers as their pages give them, on the preset's task: nothing is tuned.

Beside them runs AdamW with the setting that its grid has chosen, in the same process, so that CPU
seconds can be compared. Each optimizer is the second argument of ``jk.Optimizer``, and an update
takes the examples of an update of the preset at once.
"""

import functools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxkfac as jk
from benchmarks.digits._run import evaluation, problem_of
from jaxkfac.jobs.cli._loop import compile_epoch, epoch_rows, total_updates
from jaxkfac.jobs.cli._options import Experiment
from jaxkfac.jobs.cli._problem import learning_rate
from jaxkfac.jobs.data import shift_batch
from jaxkfac.jobs.report import TARGET_ERROR

SEEDS = range(5)
ADAMW = "AdamW, tuned"


def experiment_of(seed: int) -> Experiment:
    """The preset, without micro-batches."""
    preset = Experiment()
    return Experiment(
        seed=seed, batch_size=preset.examples_per_update, gradient_accumulation_steps=1
    )


def tuned_adamw() -> optax.GradientTransformation:
    """With the preset's schedule and gradient clipping."""
    experiment = experiment_of(0)
    options, updates = experiment.adamw, total_updates(experiment, problem_of(0))
    return optax.chain(
        optax.clip_by_global_norm(options.clip_norm),
        optax.adamw(
            learning_rate("adamw", experiment, updates),
            b2=options.b2,
            weight_decay=options.weight_decay,
        ),
    )


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    ADAMW: tuned_adamw,
    "jk.kfac()": jk.kfac,
    "jk.kfe_adam(0.01)": functools.partial(jk.kfe_adam, 0.01),
}


@functools.cache
def training_of(name: str) -> tuple[jk.Optimizer, Callable[..., Any]]:
    """The optimizer, and an epoch that is compiled once for all seeds; behind what an epoch returns
    are its CPU seconds.
    """
    opt = jk.Optimizer(problem_of(0).objective, OPTIMIZERS[name]())
    max_shift = experiment_of(0).max_shift

    def epoch(params: Any, state: Any, rows: Any, numbers: Any, data: Any, seed: Any) -> Any:
        def update(carry: Any, row: Any) -> Any:
            indices, number = row
            shift_key, key = jax.random.split(jax.random.fold_in(jax.random.key(seed), number))
            images = shift_batch(shift_key, data.images[indices], max_shift)
            params, state, loss = opt.step(*carry, (images, data.labels[indices]), key)
            return (params, state), loss

        flat = rows.reshape(len(rows), -1), numbers.reshape(-1)
        carry, losses = jax.lax.scan(update, (params, state), flat)
        return *carry, losses

    compiled: list[Any] = []

    def call(*arguments: Any) -> Any:
        if not compiled:
            compiled.append(compile_epoch(epoch, *arguments))
        begun = time.process_time()
        out = jax.block_until_ready(compiled[0](*arguments))
        return out[:2], time.process_time() - begun

    return opt, call


def train_documented(name: str, seed: int) -> dict[str, Any]:
    """Train to the target or to the end: after each epoch its updates, CPU seconds, loss, error."""
    experiment, problem = experiment_of(seed), problem_of(seed)
    opt, run = training_of(name)
    params, size = problem.initial(), experiment.batch_size
    batch = problem.train.images[:size], problem.train.labels[:size]
    state = opt.init(params, jax.eval_shape(lambda: batch))
    total, step, cpu, epochs = total_updates(experiment, problem), 0, 0.0, []
    while step < total and not (epochs and epochs[-1][-1] <= TARGET_ERROR):
        rows, numbers = map(jnp.asarray, epoch_rows(experiment, problem, step, total))
        arguments = params, state, rows, numbers, problem.train, jnp.asarray(seed)
        (params, state), spent = run(*arguments)
        cpu, step = cpu + spent, step + len(rows)
        loss, accuracy = map(float, evaluation()(params, problem.validation))
        epochs.append([step, round(cpu, 4), loss, round(1 - accuracy, 6)])
    return {"epochs": epochs}


def documented_table(lines: list[dict[str, Any]]) -> list[str]:
    """Updates and CPU seconds to the target: the median over the seeds, and all of them."""
    head = ["as documented", f"updates to {TARGET_ERROR:.0%}", "CPU s", "÷ AdamW's CPU s"]
    table, beside = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"], float("nan")
    for name in OPTIMIZERS:
        runs = sorted((x for x in lines if x["optimizer"] == name), key=lambda x: x["seed"])
        if not runs:
            continue
        there = [x["epochs"][-1][-1] <= TARGET_ERROR for x in runs]
        needed = [
            x["epochs"][-1][:2] if reached else [math.inf] * 2
            for x, reached in zip(runs, there, strict=True)
        ]
        updates, cpu = (statistics.median(x[k] for x in needed) for k in (0, 1))
        beside = cpu if name == ADAMW else beside
        each = ", ".join(f"{x[1]:.1f}" if math.isfinite(x[1]) else "–" for x in needed)
        cells = [f"{updates:.0f}", f"{cpu:.2f}", f"{cpu / beside:.2f}"]
        if not math.isfinite(cpu):  # more than half of the seeds do not reach it
            cells = ["–"] * 3
        table.append(f"| {name} | {cells[0]} | {cells[1]} ({each}) | {cells[2]} |")
    return table
