"""A gated recurrent unit that reads a digit row by row: one layer used eight times, in a scan."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.optimizers._digits import classifier
from benchmarks.optimizers._problem import glorot

WIDTH, ROW = 64, 8


def initial(seed: int) -> dict[str, Any]:
    """Glorot's for every gate."""
    rng = np.random.default_rng(seed)

    def gates(n: int) -> np.ndarray:
        return np.concatenate([glorot(rng, n, WIDTH) for _ in range(3)], -1)

    return {
        "inputs": gates(ROW),
        "inputs_bias": np.zeros(3 * WIDTH, np.float32),
        "states": gates(WIDTH),
        "states_bias": np.zeros(3 * WIDTH, np.float32),
        "head": glorot(rng, WIDTH, 10),
        "head_bias": np.zeros(10, np.float32),
    }


def logits(params: Any, images: jax.Array) -> jax.Array:
    """Of the classes, from the last state."""

    def read(state: jax.Array, row: jax.Array) -> tuple[jax.Array, None]:
        x = jnp.split(row @ params["inputs"] + params["inputs_bias"], 3, -1)
        h = jnp.split(state @ params["states"] + params["states_bias"], 3, -1)
        reset, keep = jax.nn.sigmoid(x[0] + h[0]), jax.nn.sigmoid(x[1] + h[1])
        return keep * state + (1 - keep) * jnp.tanh(x[2] + reset * h[2]), None

    start = jnp.zeros((len(images), WIDTH))
    last, _ = jax.lax.scan(read, start, jnp.swapaxes(images, 0, 1))
    return last @ params["head"] + params["head_bias"]


GRU = classifier(
    name="gru", title="GRU of width 64 over rows, digits", initial=initial, logits=logits
)
