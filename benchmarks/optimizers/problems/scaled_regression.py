"""A regression as it comes out of a table: inputs and outputs have units of their own.

The data are synthetic: a network of tanh in whitened inputs. What the optimizers see are these
inputs mixed by a rotation after each has been given a scale between 0.03 and 30, and outputs whose
scales lie between 0.1 and 30. Nobody has standardized them.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.optimizers._problem import Arrays, Mark, Problem, dense_layers, rows

SIZES = (24, 64, 64, 4)
TRAIN, HELD_OUT, BATCH = 2048, 512, 128
INPUT_SCALES = np.geomspace(0.03, 30, SIZES[0])
OUTPUT_SCALES = np.geomspace(0.1, 30, SIZES[-1])


def data() -> Arrays:
    """Inputs and outputs, with noise of a twentieth of each output's scale."""
    rng = np.random.default_rng(0)
    white = rng.normal(size=(TRAIN + HELD_OUT, SIZES[0]))
    hidden = np.tanh(white @ rng.normal(size=(SIZES[0], 32)) / np.sqrt(SIZES[0]))
    clean = hidden @ rng.normal(size=(32, SIZES[-1])) / np.sqrt(32)
    targets = OUTPUT_SCALES * (clean + 0.05 * rng.normal(size=clean.shape))
    rotation = np.linalg.qr(rng.normal(size=(SIZES[0], SIZES[0])))[0]
    inputs = (white * INPUT_SCALES) @ rotation
    parts = {
        "inputs": inputs[:TRAIN],
        "targets": targets[:TRAIN],
        "validation_inputs": inputs[TRAIN:],
        "validation_targets": targets[TRAIN:],
    }
    return {name: part.astype(np.float32) for name, part in parts.items()}


def batch(data: Arrays, seed: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets."""
    chosen = rows(len(data["inputs"]), BATCH, seed, step)
    return data["inputs"][chosen], data["targets"][chosen]


def outputs(params: Any, x: jax.Array) -> jax.Array:
    """In the targets' units."""
    for p in params[:-1]:
        x = jnp.tanh(x @ p["w"] + p["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def _half_squares(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    return 0.5 * jnp.square(outputs - targets).sum(-1).mean()


def loss(params: Any, batch: Any, mark: Mark) -> jax.Array:
    """Half the squared distance, the mean over the examples."""
    inputs, targets = batch
    return _half_squares(mark("gaussian", outputs(params, inputs), targets), targets)


def validate(params: Any, data: Any) -> jax.Array:
    """The same on the examples held out."""
    return _half_squares(outputs(params, data["validation_inputs"]), data["validation_targets"])


SCALED_REGRESSION = Problem(
    name="scaled_regression",
    title="Badly scaled regression, 24-64-64-4",
    measure="half squared distance of held-out targets",
    fisher="mc",
    data=data,
    initial=lambda seed: dense_layers(seed, SIZES),
    batch=batch,
    loss=loss,
    validate=validate,
)
