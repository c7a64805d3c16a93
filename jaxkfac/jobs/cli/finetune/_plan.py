"""`--plan`: the memory that a run needs, before anything is loaded."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from rich.console import Console

import jaxkfac as jk
from jaxkfac.jobs.cli._out_of_memory import Need, RunShapes, free_room, remedy
from jaxkfac.jobs.cli.finetune._family import dtype_of
from jaxkfac.jobs.cli.finetune._load import load_text, model_shapes
from jaxkfac.jobs.cli.finetune._options import FinetuneArguments, Finetuning
from jaxkfac.jobs.cli.finetune._problem import (
    FinetuneProblem,
    build_optimizer,
    build_problem,
    shaped_problem,
    total_updates,
)
from jaxkfac.jobs.report import terminal_table
from jaxkfac.memory import bytes_text, parse_bytes
from jaxkfac.planning import plan_memory

# ---------------- bytes of a fine-tuning run, from shapes


def finetune_shapes(arguments: FinetuneArguments) -> RunShapes:
    """Bytes of a run with the longest rows; counts the tokens once and reads no weights."""
    experiment = arguments.experiment
    text = load_text(experiment, strict=arguments.strict)
    batches = build_problem(experiment, model_shapes(experiment), text).train
    return _run_shapes(batches)


def planned_shapes() -> RunShapes:
    """Bytes of a run with rows as long as its options allow; reads neither text nor weights."""
    return _run_shapes(None)


def _run_shapes(batches: Any) -> RunShapes:
    @functools.cache
    def need(arguments: FinetuneArguments) -> Need:
        # The number of updates changes no byte, and epochs would need the text to be counted.
        experiment = dataclasses.replace(arguments.experiment, epochs=None)
        return _need(experiment, shaped_problem(experiment, model_shapes(experiment), batches))

    return RunShapes(need, [_changed(name) for name in ("remat", "dtype", "quantize")])


def _changed(name: str) -> Callable[[FinetuneArguments], FinetuneArguments | None]:
    def change(arguments: FinetuneArguments) -> FinetuneArguments | None:
        experiment = arguments.experiment
        least: dict[str, Any] = {"remat": True, "dtype": "bfloat16", "quantize": "all"}
        now = {"dtype": jnp.dtype(dtype_of(experiment)).name}.get(name, getattr(experiment, name))
        if now == least[name] or (name == "quantize" and experiment.train == "all"):
            return None
        changed = dataclasses.replace(experiment, **{name: least[name]})
        return dataclasses.replace(arguments, experiment=changed)

    return change


def _need(experiment: Finetuning, problem: FinetuneProblem) -> Need:
    adapted, params, (inputs, targets, mask) = problem.adapted, problem.params, problem.rows

    # The base is an input: an objective cannot close over shapes.
    def apply(adapters: Any, base_and_inputs: Any, key: Any = None) -> jax.Array:
        base, inputs = base_and_inputs
        return adapted(base, adapters, inputs, key=key)

    kfac = experiment.kfac
    plan = plan_memory(
        jk.Objective(apply, jk.Categorical()),
        problem.adapters,
        ((params, inputs), targets, mask),
        optimizer=_optimizer(experiment, problem),
        device_bytes=1,
        curvature=experiment.optimizer == "kfac",
        options=(),
        compiled="none",
        fisher=kfac.fisher,
        uncovered="ignore",
        max_dense=kfac.max_dense,
    )
    rows = plan.now.at_once
    base = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
    rows["batch"] -= base
    if base:
        rows["base model"] = base
    return Need(rows)


def _optimizer(experiment: Finetuning, problem: FinetuneProblem) -> optax.GradientTransformation:
    """A transformation that allocates the same state as the run's optimizer."""

    def init(params: Any, adapters: Any) -> Any:
        pretrained = problem.pretrained._replace(params=params)
        total = total_updates(experiment, problem)
        return build_optimizer(experiment, problem._replace(pretrained=pretrained), total).init(
            adapters
        )

    state = jax.eval_shape(init, problem.params, problem.adapters)

    def zeros(params: Any) -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state)

    return optax.GradientTransformation(zeros, optax.identity().update)  # never updates


# ---------------- printing


def print_plan(arguments: FinetuneArguments) -> None:
    """Print the bytes of a run by row, and whether they fit, or options by which they would.

    Raises:
        ValueError: ``device_bytes`` cannot be read.
    """
    room = free_room()
    if arguments.device_bytes is not None:
        room = int(parse_bytes(arguments.device_bytes, name="--device-bytes"))
    shapes = planned_shapes()
    need, experiment = shapes.need(arguments), arguments.experiment
    rows = [[name, bytes_text(nbytes)] for name, nbytes in need.rows.items() if nbytes]
    rows.append(["sum", bytes_text(need.total)])
    headline = (
        f"{experiment.model}: {experiment.batch_size} × {experiment.gradient_accumulation_steps} "
        f"rows an update, {experiment.optimizer}, {jnp.dtype(dtype_of(experiment)).name}"
    )
    console = Console()
    console.print(headline, soft_wrap=True, highlight=False)
    console.print(terminal_table("Plan", ["", "bytes"], rows))
    fits = need.total <= room
    verdict = f"It fits {bytes_text(room)}." if fits else remedy(arguments, shapes, room)
    console.print(verdict, soft_wrap=True, highlight=False)
