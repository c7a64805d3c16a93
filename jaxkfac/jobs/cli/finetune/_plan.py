"""`--plan`: the memory that a run needs, before anything is loaded."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array
from rich.console import Console

import jaxkfac as jk
from jaxkfac._arguments import ArrayTree
from jaxkfac.jobs.cli._devices import axis_sizes
from jaxkfac.jobs.cli._out_of_memory import Need, RunShapes, free_room, remedy
from jaxkfac.jobs.cli.finetune._family import dtype_of
from jaxkfac.jobs.cli.finetune._load import load_text, model_shapes
from jaxkfac.jobs.cli.finetune._options import FinetuneArguments, Finetuning
from jaxkfac.jobs.cli.finetune._problem import (
    FinetuneProblem,
    build_problem,
    collection_of,
    collector,
    likelihood_of,
    one_step_optimizer,
    shaped_problem,
    total_updates,
)
from jaxkfac.jobs.report import terminal_table
from jaxkfac.memory import bytes_text, parse_bytes
from jaxkfac.planning import MemoryPlan, TargetName, plan_memory

# ---------------- one plan of a run, for `finetune --plan` and for `plan`


def run_shapes(experiment: Finetuning, batches: Any = None) -> FinetuneProblem:
    """The problem of a run in shapes; rows are those of ``batches``, or as long as the options
    allow.
    """
    return shaped_problem(experiment, model_shapes(experiment), batches)


def shaped_objective(
    experiment: Finetuning, problem: FinetuneProblem
) -> tuple[jk.Objective, ArrayTree]:
    """The objective of a run, and the longest rows; the base is among the inputs.

    An objective cannot close over shapes.
    """
    adapted, drops = problem.adapted, problem.drops(experiment)
    inputs, targets, mask = problem.rows

    def apply(
        adapters: ArrayTree, base_and_inputs: ArrayTree, key: Array | None = None
    ) -> jax.Array:
        base, inputs = base_and_inputs
        return adapted(base, adapters, inputs, key=key if drops else None)

    objective = jk.Objective(apply, likelihood_of(experiment))
    return objective, ((problem.params, inputs), targets, mask)


def plan_run(experiment: Finetuning, problem: FinetuneProblem, **choices: Any) -> MemoryPlan:
    """Plan the memory of a fine-tuning run from shapes.

    Args:
        experiment: Options of the run.
        problem: Its problem, with shapes as parameters.
        **choices: Arguments of :func:`jaxkfac.planning.plan_memory`, among them ``device_bytes``;
            ``optimizer=`` and the arguments about factors replace those of the run.
    """
    params = problem.params
    objective, batch = shaped_objective(experiment, problem)

    def like() -> Any:
        return collector(experiment, objective).factor_shapes(problem.adapters, batch)

    if "optimizer" not in choices:
        num_updates = total_updates(experiment, problem)
        choices["optimizer"] = one_step_optimizer(experiment, num_updates, like=like)
    of_run: dict[str, Any] = {
        "curvature": experiment.optimizer == "kfac",
        "accumulation_steps": experiment.gradient_accumulation_steps,
        "accumulator_dtype": experiment.accumulator_dtype,
        "frozen": params if jax.tree.leaves(params) else None,
        **collection_of(experiment),
    }
    return plan_memory(objective, problem.adapters, batch, **of_run | choices)


# ---------------- bytes of a fine-tuning run, and changes by which they become fewer


def finetune_shapes(arguments: FinetuneArguments) -> RunShapes:
    """Bytes of a run with the longest rows; counts the tokens once and reads no weights."""
    experiment = arguments.experiment
    text = load_text(experiment, strict=arguments.strict)
    batches = build_problem(experiment, model_shapes(experiment), text).train
    return _run_shapes(batches, None)


def planned_shapes(compiler: TargetName | None = None) -> RunShapes:
    """Bytes of a run with rows as long as its options allow; reads neither text nor weights.

    Args:
        compiler: The kind of device; ``None`` is this process's.
    """
    return _run_shapes(None, compiler)


def _run_shapes(batches: Any, compiler: TargetName | None) -> RunShapes:
    problem = functools.cache(lambda experiment: run_shapes(experiment, batches))

    @functools.cache
    def need_of(experiment: Finetuning) -> Need:
        return _need(experiment, problem(experiment), compiler)

    def need(arguments: FinetuneArguments) -> Need:
        experiment = _without_epochs(arguments.experiment)
        if experiment.gradient_accumulation_steps == 1:  # nothing is accumulated
            experiment = dataclasses.replace(experiment, accumulator_dtype="float32")
        return need_of(experiment)

    def least(arguments: FinetuneArguments) -> int:
        experiment = _without_epochs(arguments.experiment)
        shapes = problem(experiment)
        state = None
        if experiment.optimizer != "kfac":  # whose factors would have to be found
            tx = one_step_optimizer(experiment, experiment.steps, like=lambda: None)
            state = jax.eval_shape(tx.init, shapes.adapters)
        return _nbytes((shapes.params, shapes.adapters, state))

    return RunShapes(need, [*map(_changed, _LEAST)], least)


def _nbytes(tree: ArrayTree) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _without_epochs(experiment: Finetuning) -> Finetuning:
    # The number of updates changes no byte, and epochs would need the text to be counted.
    return dataclasses.replace(experiment, epochs=None)


# Values with fewer bytes, from the change that costs least to the one that costs most: roundings of
# sums, a forward pass, roundings of parameters, another optimizer, fewer trained parameters, and
# fewer bits of the others.
_LEAST: Mapping[str, Any] = MappingProxyType(
    {
        "accumulator_dtype": "bfloat16",
        "remat": True,
        "dtype": "bfloat16",
        "optimizer": "adafactor",
        "train": "adapter",
        "quantize": "all",
    }
)


def _changed(name: str) -> Callable[[FinetuneArguments], FinetuneArguments | None]:
    def change(arguments: FinetuneArguments) -> FinetuneArguments | None:
        experiment = arguments.experiment
        now = {"dtype": jnp.dtype(dtype_of(experiment)).name}.get(name, getattr(experiment, name))
        if now == _LEAST[name] or (name == "quantize" and experiment.train == "all"):
            return None
        changed = dataclasses.replace(experiment, **{name: _LEAST[name]})
        return dataclasses.replace(arguments, experiment=changed)

    return change


def _need(experiment: Finetuning, problem: FinetuneProblem, compiler: TargetName | None) -> Need:
    plan = plan_run(
        experiment, problem, device_bytes=1, options=(), compiler=compiler, compiled="none"
    )
    rows = plan.now.at_once
    if base := _nbytes(problem.params):
        rows["parameters"] -= base
        rows["base model"] = base
    return Need(rows, f"counted for {plan.compiled_for}, ±{plan.within:.0%}", plan.not_traced)


# ---------------- printing


def print_plan(arguments: FinetuneArguments) -> None:
    """Print the bytes of a run by row, and whether they fit, or options by which they would.

    Raises:
        ValueError: ``device_bytes`` cannot be read.
    """
    compiler = arguments.compiler
    if arguments.device_bytes is None:
        room = free_room()
    else:
        room = int(parse_bytes(arguments.device_bytes, name="--device-bytes"))
        compiler = compiler or "h100"
    shapes = planned_shapes(compiler)
    need, experiment = shapes.need(arguments), arguments.experiment
    rows = [[name, bytes_text(nbytes)] for name, nbytes in need.rows.items() if nbytes]
    rows.append(["sum", bytes_text(need.total)])
    trained = "all parameters"
    if experiment.train == "adapter":
        trained = f"an adapter of rank {experiment.adapter.rank}"
    headline = (
        f"{experiment.model}: {experiment.batch_size} × {experiment.gradient_accumulation_steps} "
        f"rows an update, {experiment.optimizer}, {jnp.dtype(dtype_of(experiment)).name}; "
        f"{trained}, rows of {experiment.max_length} tokens, activations "
        f"{'recomputed' if experiment.remat else 'kept'}; {need.how}"
    )
    console = Console()
    console.print(headline, soft_wrap=True, highlight=False)
    console.print(terminal_table("Plan", ["", "bytes"], rows))
    if (count := math.prod(axis_sizes(arguments.devices, arguments.mesh).values())) > 1:
        several = (
            f"This is the whole batch beside the whole base on one device; of {count} devices each "
            "needs at most that."
        )
        console.print(several, soft_wrap=True, highlight=False)
    if need.not_traced:
        left_out = f"temporaries of the update are not counted: {need.not_traced}"
        console.print(left_out, soft_wrap=True, highlight=False)
    fits = need.total <= room
    verdict = f"It fits {bytes_text(room)}." if fits else remedy(arguments, shapes, room)
    console.print(verdict, soft_wrap=True, highlight=False)
