"""One run, as `jaxkfac train` makes it, with CPU time measured by the epoch."""

import dataclasses
import functools
import math
import time
import types
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.digits._settings import SHARED
from jaxkfac.jobs.cli._loop import (
    compile_epoch,
    epoch_rows,
    make_epoch,
    make_evaluation,
    total_updates,
)
from jaxkfac.jobs.cli._options import Experiment, Optimizer
from jaxkfac.jobs.cli._problem import DigitsProblem, build_optimizer, digits_problem
from jaxkfac.jobs.report import TARGET_ERROR

_SHAPED_BY = 0  # the seed of a problem that gives shapes and data alone
# Numbers of a setting that a program takes as arguments.
NUMBERS = ("learning_rate", "norm_constraint", "damping", "b2")


@functools.cache
def problem_of(seed: int) -> DigitsProblem:
    """The preset's: the images are the same for every seed."""
    return digits_problem(Experiment(seed=seed))


@functools.cache
def program(name: Optimizer, static: tuple[tuple[str, Any], ...], numbers: tuple[str, ...]) -> Any:
    """An epoch, compiled once for all seeds and settings that differ in ``numbers`` alone."""
    problem, default = problem_of(_SHAPED_BY), Experiment()
    total = total_updates(default, problem)

    def epoch(params: Any, state: Any, rows: Any, counts: Any, data: Any, seed: Any, given: Any):
        options = dataclasses.replace(SHARED[name], **dict(static), **given)
        asked: Any = types.SimpleNamespace(**vars(default) | {"seed": seed, name: options})
        tx = build_optimizer(name, asked, problem, total)
        return make_epoch(asked, problem, tx, factors=name == "kfac")(
            params, state, rows, counts, data
        )

    compiled: list[Any] = []

    def call(*arguments: Any) -> Any:
        if not compiled:
            compiled.append(compile_epoch(epoch, *arguments))
        started = time.process_time()
        out = jax.block_until_ready(compiled[0](*arguments))
        return out[:2], time.process_time() - started

    return call


def train(name: Optimizer, setting: dict[str, Any], seed: int, *, whole: bool) -> dict[str, Any]:
    """One run: after each epoch its updates, CPU seconds, and loss and error of the validation set.

    Args:
        name: Of the optimizer.
        setting: Its options beside those that all settings share.
        seed: Of the run.
        whole: Whether it goes on when it is at the target; its test accuracy is measured then.
    """
    adapts = setting.get("adapt_damping")
    given = {} if adapts else {x: setting[x] for x in NUMBERS if x in setting}
    static = {x: value for x, value in setting.items() if x not in given}
    run = program(name, tuple(static.items()), tuple(given))
    options: Any = {name: dataclasses.replace(SHARED[name], **setting)}
    experiment = dataclasses.replace(Experiment(), seed=seed, **options)
    problem = problem_of(seed)
    total = total_updates(experiment, problem)
    params = problem.initial()
    state = build_optimizer(name, experiment, problem, total).init(params)
    evaluate, step, cpu, epochs = evaluation(), 0, 0.0, []
    while step < total:
        rows, counts = map(jnp.asarray, epoch_rows(experiment, problem, step, total))
        arguments = params, state, rows, counts, problem.train, jnp.asarray(seed)
        (params, state), spent = run(*arguments, jax.tree.map(jnp.float32, given))
        cpu, step = cpu + spent, step + len(rows)
        loss, accuracy = map(float, evaluate(params, problem.validation))
        if not math.isfinite(loss):
            break
        epochs.append([step, round(cpu, 4), loss, round(1 - accuracy, 6)])
        if not whole and epochs[-1][-1] <= TARGET_ERROR:
            break
    record: dict[str, Any] = {"epochs": epochs}
    if whole:
        record["train_loss"] = float(evaluate(params, problem.train)[0])
        record["test_accuracy"] = float(evaluate(params, problem.test)[1])
    return record


@functools.cache
def evaluation() -> Any:
    """``evaluate(params, data) -> (mean loss, accuracy)``."""
    return make_evaluation(problem_of(_SHAPED_BY))
