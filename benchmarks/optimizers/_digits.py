"""Small networks on the 8 x 8 digits: a hundred steps of 128 examples take seconds on one core."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.optimizers._problem import Arrays, Mark, Problem, rows

BATCH = 128


def digits() -> Arrays:
    """The 1,438 training digits, and the 359 test digits for validation; pixels in [0, 1]."""
    from jaxkfac.data import load_digits

    train, test = load_digits("train", seed=0), load_digits("test", seed=0)
    return {
        "images": np.asarray(train.images),
        "labels": np.asarray(train.labels),
        "validation_images": np.asarray(test.images),
        "validation_labels": np.asarray(test.labels),
    }


def images(data: Arrays, seed: int, step: int) -> np.ndarray:
    """A batch ``(BATCH, 8, 8)``."""
    return data["images"][rows(len(data["images"]), BATCH, seed, step)]


def classifier(
    *,
    name: str,
    title: str,
    initial: Callable[[int], Any],
    logits: Callable[[Any, jax.Array], jax.Array],
) -> Problem:
    """The problem of telling the digits apart, with ``logits(params, images)``."""

    def batch(data: Arrays, seed: int, step: int) -> tuple[np.ndarray, np.ndarray]:
        chosen = rows(len(data["labels"]), BATCH, seed, step)
        return data["images"][chosen], data["labels"][chosen]

    def nats(z: jax.Array, labels: jax.Array) -> jax.Array:
        return -jnp.take_along_axis(jax.nn.log_softmax(z), labels[:, None], -1).mean()

    def loss(params: Any, batch: Any, mark: Mark) -> jax.Array:
        return nats(mark("categorical", logits(params, batch[0]), batch[1]), batch[1])

    def validate(params: Any, data: Any) -> jax.Array:
        return nats(logits(params, data["validation_images"]), data["validation_labels"])

    return Problem(
        name=name,
        title=title,
        measure="cross entropy of held-out digits, nats",
        fisher="mc",
        data=digits,
        initial=initial,
        batch=batch,
        loss=loss,
        validate=validate,
    )
