"""The optimizers as their pages give them, on the preset's task: nothing is tuned.

Beside them runs AdamW with the setting that its grid has chosen, in the same process, so that CPU
seconds can be compared.
"""

import functools
import math
import statistics
import time
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxkfac as jk
from benchmarks.digits._run import evaluation, problem_of
from jaxkfac.jobs.cli._loop import compile_epoch, epoch_rows, make_epoch, total_updates
from jaxkfac.jobs.cli._options import Experiment
from jaxkfac.jobs.cli._problem import DigitsProblem, build_optimizer
from jaxkfac.jobs.report import TARGET_ERROR

SEEDS = range(5)
ADAMW = "AdamW, tuned"


def tuned_adamw(problem: DigitsProblem) -> optax.GradientTransformationExtraArgs:
    experiment = Experiment()
    return build_optimizer("adamw", experiment, problem, total_updates(experiment, problem))


class Documented(types.SimpleNamespace):
    """An optimizer of a page: ``make(problem)``, its Fisher type, and whether it adapts itself."""

    make: Callable[[DigitsProblem], optax.GradientTransformationExtraArgs]
    fisher: Any
    adapts: bool


OPTIMIZERS = {
    ADAMW: Documented(make=tuned_adamw, fisher=None, adapts=False),
    "jk.kfac(like=like)": Documented(
        make=lambda problem: jk.multi_steps(jk.kfac(like=problem.like), 1),
        fisher="mc",
        adapts=True,
    ),
    "jk.kfe_adam(0.01, like=like)": Documented(
        make=lambda problem: jk.multi_steps(jk.kfe_adam(0.01, like=problem.like), 1),
        fisher="empirical",
        adapts=False,
    ),
}


@functools.cache
def epoch_program(name: str) -> Callable[..., Any]:
    """An epoch, compiled once for all seeds; behind what it returns are its CPU seconds."""
    problem, optimizer = problem_of(0), OPTIMIZERS[name]
    factors = optimizer.fisher is not None
    if factors:
        collect = jk.value_grad_and_factors(problem.objective, fisher=optimizer.fisher)
        problem = problem._replace(statistics=collect)
    tx = optimizer.make(problem)

    def epoch(params: Any, state: Any, rows: Any, counts: Any, data: Any, seed: Any) -> Any:
        options = vars(Experiment()) | {"seed": seed, "kfac": optimizer}
        experiment: Any = types.SimpleNamespace(**options)
        return make_epoch(experiment, problem, tx, factors=factors)(
            params, state, rows, counts, data
        )

    compiled: list[Any] = []

    def call(*arguments: Any) -> Any:
        if not compiled:
            compiled.append(compile_epoch(epoch, *arguments))
        begun = time.process_time()
        out = jax.block_until_ready(compiled[0](*arguments))
        return out[:2], time.process_time() - begun

    return call


def train_documented(name: str, seed: int) -> dict[str, Any]:
    """Train to the target or to the end: after each epoch its updates, CPU seconds, loss, error."""
    experiment = Experiment(seed=seed)
    problem, run = problem_of(seed), epoch_program(name)
    params = problem.initial()
    state = OPTIMIZERS[name].make(problem).init(params)
    total, step, cpu, epochs = total_updates(experiment, problem), 0, 0.0, []
    while step < total and not (epochs and epochs[-1][-1] <= TARGET_ERROR):
        rows, counts = map(jnp.asarray, epoch_rows(experiment, problem, step, total))
        arguments = params, state, rows, counts, problem.train, jnp.asarray(seed)
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
