"""What a run of `jaxkfac train` needs, from shapes."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from jaxkfac.cli._loop import make_evaluation, total_updates
from jaxkfac.cli._optimizers import Optimizer
from jaxkfac.cli._options import TrainArguments
from jaxkfac.cli._problem import DigitsProblem, build_optimizer, digits_on_host
from jaxkfac.cli._remedies import Need, RunShapes
from jaxkfac.planning import IN_TURN, plan_memory


def train_shapes(arguments: TrainArguments) -> RunShapes:
    """Bytes of the larger of the runs with each optimizer; nothing is allocated."""

    @functools.cache
    def need(arguments: TrainArguments) -> Need:
        chosen = arguments.optimizer
        names: tuple[Optimizer, ...] = ("kfac", "adamw") if chosen == "both" else (chosen,)
        problem = digits_on_host(arguments.experiment)
        needs = [_need(arguments, name, problem) for name in names]
        return max(needs, key=lambda need: need.total)

    return RunShapes(need, [_adamw])


def _adamw(arguments: TrainArguments) -> TrainArguments | None:
    if arguments.optimizer == "adamw":
        return None
    return dataclasses.replace(arguments, optimizer="adamw")


def _need(arguments: TrainArguments, name: Optimizer, problem: DigitsProblem) -> Need:
    experiment = arguments.experiment
    train, size = problem.train, experiment.batch_size
    plan = plan_memory(
        problem.objective,
        problem.shapes,
        (train.images[:size], train.labels[:size]),
        optimizer=build_optimizer(name, experiment, problem, total_updates(experiment, problem)),
        device_bytes=1,
        curvature=name == "kfac",
        options=(),
        compiled="none",
        fisher=experiment.fisher,
    )
    rows = plan.now.at_once
    evaluation = _evaluation_bytes(problem)
    (turn,) = (row for row in rows if row in IN_TURN)
    if evaluation > rows[turn]:  # never at the same time
        del rows[turn]
        rows["evaluation on the whole training set"] = evaluation
    return Need(rows)


def _evaluation_bytes(problem: DigitsProblem) -> int:
    data = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), problem.train)
    compiled: Any = make_evaluation(problem)
    analysis = compiled.lower(problem.shapes, data).compile().memory_analysis()
    return int(analysis.temp_size_in_bytes)
