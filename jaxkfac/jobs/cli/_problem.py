"""The digits preset: data, model, objective and optimizers, built from an experiment."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.typing import ArrayLike
from jaxtyping import Array

import jaxkfac as jk
from jaxkfac._arguments import ArrayTree
from jaxkfac._errors import one_of
from jaxkfac.jobs.cli._options import Experiment, Optimizer
from jaxkfac.jobs.data import Digits, load_digits
from jaxkfac.jobs.models import VisionTransformer, VisionTransformerConfig

# ---------------- learning-rate schedules


Shape = Literal["cosine", "linear", "constant"]


def warmup_schedule(
    peak: float, warmup: float, num_updates: int, shape: Shape = "cosine"
) -> optax.Schedule:
    """Rise linearly to ``peak``, then fall to zero or stay constant.

    Written here because optax's schedules mix dtypes, which strict promotion rejects.

    Args:
        peak: Largest learning rate.
        warmup: Fraction of the updates in which the rate rises, in [0, 1).
        num_updates: Updates of the run.
        shape: How the rate falls: along a cosine, along a line, or not at all.
    """
    one_of("shape", shape, get_args(Shape))
    rising = min(round(warmup * num_updates), num_updates - 1)

    def schedule(step: ArrayLike) -> Array:
        step = jnp.asarray(step, jnp.float32)
        up = (step + 1) / max(rising, 1)
        fallen = jnp.clip((step - rising) / (num_updates - rising), 0.0, 1.0)
        if shape == "cosine":
            remaining = 0.5 * (1 + jnp.cos(jnp.pi * fallen))
        else:
            remaining = 1 - fallen if shape == "linear" else jnp.ones_like(fallen)
        return peak * jnp.where(step < rising, up, remaining)

    return schedule


# ---------------- the problem


class DigitsProblem(NamedTuple):
    """Data, model and objective, before any training.

    Attributes:
        train: Images and labels to learn from.
        validation: Held-out images and labels, for choosing settings and measuring times.
        test: Held-out images and labels that no choice depends on.
        apply_fn: ``apply_fn(params, images) -> logits``.
        initial: ``initial() -> params`` with the same values at each call. Training donates
            them, so every run creates its own.
        shapes: Shapes of the parameters.
        objective: Mean cross entropy of ``(images, labels)``.
        statistics: ``statistics(params, batch, key) -> (value, grads, factors)``.
        like: Shapes of the factors.
    """

    train: Digits
    validation: Digits
    test: Digits
    apply_fn: Callable[..., Any]
    initial: Callable[[], ArrayTree]
    shapes: ArrayTree
    objective: Any
    statistics: Any
    like: Any

    @property
    def data(self) -> tuple[Digits, Digits, Digits]:
        """Training, validation and test set."""
        return self.train, self.validation, self.test

    def with_data(self, data: tuple[Digits, Digits, Digits]) -> "DigitsProblem":
        """A copy of the problem with other arrays as data."""
        return self._replace(train=data[0], validation=data[1], test=data[2])


def digits_problem(experiment: Experiment) -> DigitsProblem:
    """The vision transformer on the handwritten digits."""
    problem = digits_on_host(experiment)
    return problem.with_data(jax.tree.map(jnp.asarray, problem.data))


def digits_on_host(experiment: Experiment) -> DigitsProblem:
    """Like :func:`digits_problem`, with the data on the host and nothing on the device."""
    held_out: dict[str, Any] = {"test_fraction": 0.1, "validation_fraction": 0.1}
    train, validation, test = (
        load_digits(split, seed=experiment.split_seed, **held_out)
        for split in ("train", "validation", "test")
    )
    config = VisionTransformerConfig(**dataclasses.asdict(experiment.model))

    def model() -> VisionTransformer:
        return VisionTransformer(config, rngs=nnx.Rngs(experiment.seed))

    apply_fn, shapes = jk.from_nnx(nnx.eval_shape(model))
    objective = jk.Objective(apply_fn, jk.Categorical())
    statistics = jk.value_grad_and_factors(objective, fisher=experiment.fisher)
    size = experiment.batch_size
    if size > len(train.labels):
        raise ValueError(f"batch_size must be at most {len(train.labels)} (examples), not {size}")
    like = statistics.factor_shapes(shapes, (train.images[:size], train.labels[:size]))

    def initial() -> ArrayTree:
        return jk.from_nnx(model())[1]

    return DigitsProblem(
        train, validation, test, apply_fn, initial, shapes, objective, statistics, like
    )


def find_layers(problem: DigitsProblem) -> Any:
    """The layer table of the problem's objective."""
    batch = (problem.train.images[:2], problem.train.labels[:2])
    return jk.find_layers(problem.objective, problem.shapes, batch)


def learning_rate(name: str, experiment: Experiment, num_updates: int) -> optax.Schedule:
    """The learning rate as a function of the number of the update."""
    options = getattr(experiment, name)
    return warmup_schedule(options.learning_rate, options.warmup, num_updates)


def build_optimizer(
    name: Optimizer,
    experiment: Experiment,
    problem: DigitsProblem,
    num_updates: int,
    *,
    distribute: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """K-FAC or AdamW with its own schedule, accumulating over micro-batches."""
    schedule = learning_rate(name, experiment, num_updates)
    if name == "kfac":
        options = experiment.kfac
        arguments: dict[str, Any] = {"learning_rate": schedule} | options.arguments()
        tx = jk.kfac(like=problem.like, distribute=distribute, **arguments)
    else:
        options = experiment.adamw
        tx = optax.chain(
            optax.clip_by_global_norm(options.clip_norm),
            optax.adamw(schedule, b2=options.b2, weight_decay=options.weight_decay),
        )
    return jk.multi_steps(tx, every_k_schedule=experiment.gradient_accumulation_steps)
