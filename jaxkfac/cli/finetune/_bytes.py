"""What a run of `jaxkfac finetune` needs, from shapes."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxkfac as jk
from jaxkfac.cli._remedies import Need, RunShapes
from jaxkfac.cli.finetune._load import dtype_of, load_text, model_shapes
from jaxkfac.cli.finetune._options import FinetuneArguments, Finetuning
from jaxkfac.cli.finetune._problem import (
    FinetuneProblem,
    as_batch,
    build_optimizer,
    build_problem,
    total_updates,
)
from jaxkfac.planning import plan_memory


def finetune_shapes(arguments: FinetuneArguments) -> RunShapes:
    """Bytes of a run with the longest rows; the tokens are counted once, no weights are read."""
    experiment = arguments.experiment
    text = load_text(experiment, strict=arguments.strict)
    problem = build_problem(experiment, model_shapes(experiment), text)

    @functools.cache
    def need(arguments: FinetuneArguments) -> Need:
        changed = arguments.experiment
        return _need(changed, problem._replace(pretrained=model_shapes(changed)))

    return RunShapes(need, [_changed(name) for name in ("remat", "dtype", "quantize")])


def _changed(name: str) -> Callable[[FinetuneArguments], FinetuneArguments | None]:
    def change(arguments: FinetuneArguments) -> FinetuneArguments | None:
        experiment = arguments.experiment
        least: dict[str, Any] = {"remat": True, "dtype": "bfloat16", "quantize": "all"}
        now = {"dtype": jnp.dtype(dtype_of(experiment)).name}.get(name, getattr(experiment, name))
        if now == least[name]:
            return None
        changed = dataclasses.replace(experiment, **{name: least[name]})
        return dataclasses.replace(arguments, experiment=changed)

    return change


def _need(experiment: Finetuning, problem: FinetuneProblem) -> Need:
    adapted, params = problem.adapted, problem.params

    # The base is an input: a shape cannot be closed over.
    def apply(adapters: Any, base_and_inputs: Any, key: Any = None) -> jax.Array:
        base, inputs = base_and_inputs
        return adapted(base, adapters, inputs, key=key)

    inputs, targets, mask = _rows(experiment, problem)
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
    rows["base model"] = base
    return Need(rows)


def _rows(experiment: Finetuning, problem: FinetuneProblem) -> Any:
    """Shapes of a batch of the longest rows."""
    first = jax.eval_shape(lambda: as_batch(problem.train.first()))
    shape = (experiment.batch_size, problem.train.lengths[-1])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(shape, x.dtype), first)


def _optimizer(experiment: Finetuning, problem: FinetuneProblem) -> optax.GradientTransformation:
    """One that allocates what the run's own would."""

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
