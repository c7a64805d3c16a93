"""The preset: data, model, objective and optimizers built from an experiment."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxkfac as jk
from jaxkfac.cli._options import Experiment, Optimizer
from jaxkfac.cli._schedules import warmup_schedule
from jaxkfac.data import Digits, load_digits
from jaxkfac.models import VisionTransformer, VisionTransformerConfig

PyTree = Any


class Problem(NamedTuple):
    """What is trained, before anything has been trained.

    Attributes:
        train: Images and labels to learn from.
        test: Images and labels held out.
        apply_fn: ``apply_fn(params, images) -> logits``.
        params: Initial parameters.
        objective: Mean cross entropy of ``(images, labels)``.
        statistics: ``statistics(params, batch, key) -> (value, grads, factors)``.
        like: The factors' shapes.
    """

    train: Digits
    test: Digits
    apply_fn: Callable[..., Any]
    params: PyTree
    objective: Any
    statistics: Any
    like: Any


def digits_problem(experiment: Experiment) -> Problem:
    """The vision transformer on the handwritten digits."""
    train, test = (jax.tree.map(jnp.asarray, data) for data in _digits(experiment))
    return _problem(experiment, train, test, _model(experiment))


def digits_shapes(experiment: Experiment) -> Problem:
    """The same with ``jax.ShapeDtypeStruct`` for parameters; data stays on the host."""
    return _problem(experiment, *_digits(experiment), nnx.eval_shape(lambda: _model(experiment)))


def _digits(experiment: Experiment) -> tuple[Digits, Digits]:
    seed = experiment.seed
    return load_digits("train", seed=seed), load_digits("test", seed=seed)


def _model(experiment: Experiment) -> VisionTransformer:
    config = VisionTransformerConfig(**dataclasses.asdict(experiment.model))
    return VisionTransformer(config, rngs=nnx.Rngs(experiment.seed))


def _problem(
    experiment: Experiment, train: Digits, test: Digits, model: VisionTransformer
) -> Problem:
    apply_fn, params = jk.from_nnx(model)
    objective = jk.Objective(apply_fn, jk.Categorical())
    statistics = jk.value_grad_and_factors(objective, fisher=experiment.fisher)
    size = experiment.batch_size
    if size > len(train.labels):
        raise ValueError(f"batch_size must be at most {len(train.labels)} (examples), not {size}")
    like = statistics.factor_shapes(params, (train.images[:size], train.labels[:size]))
    return Problem(train, test, apply_fn, params, objective, statistics, like)


def find_layers(problem: Problem) -> Any:
    """The layer table of the problem's objective."""
    batch = (problem.train.images[:2], problem.train.labels[:2])
    return jk.find_layers(problem.objective, problem.params, batch)


def build_optimizer(
    name: Optimizer, experiment: Experiment, problem: Problem, num_updates: int
) -> optax.GradientTransformationExtraArgs:
    """K-FAC or AdamW, accumulating over micro-batches, with a schedule of its own."""
    if name == "kfac":
        options = experiment.kfac
        tx = jk.kfac(
            warmup_schedule(options.learning_rate, options.warmup, num_updates),
            like=problem.like,
            damping=options.damping,
            damping_mode=options.damping_mode,
            decay=options.decay,
            refresh_every=options.refresh_every,
            momentum=options.momentum,
            norm_constraint=options.norm_constraint,
            weight_decay=options.weight_decay,
            max_condition=options.max_condition,
        )
    else:
        options = experiment.adamw
        schedule = warmup_schedule(options.learning_rate, options.warmup, num_updates)
        tx = optax.chain(
            optax.clip_by_global_norm(options.clip_norm),
            optax.adamw(schedule, b2=options.b2, weight_decay=options.weight_decay),
        )
    return jk.multi_steps(tx, every_k_schedule=experiment.gradient_accumulation_steps)
