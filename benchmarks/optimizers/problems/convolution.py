"""Three convolutions and a linear layer on the digits, without normalization."""

from typing import Any

import jax
import numpy as np

from benchmarks.optimizers._digits import classifier
from benchmarks.optimizers._problem import glorot

CHANNELS = (1, 16, 32, 32)  # the second and third convolution halve the image


def initial(seed: int) -> dict[str, Any]:
    """Glorot's."""
    rng = np.random.default_rng(seed)
    return {
        "convolutions": [
            {"kernel": glorot(rng, 3, 3, n, m), "b": np.zeros(m, np.float32)}
            for n, m in zip(CHANNELS, CHANNELS[1:], strict=False)
        ],
        "head": glorot(rng, 4 * CHANNELS[-1], 10),
        "head_bias": np.zeros(10, np.float32),
    }


def logits(params: Any, images: jax.Array) -> jax.Array:
    """Of the classes, from the last 2 x 2 places."""
    x = images[..., None]
    for i, p in enumerate(params["convolutions"]):
        strides = (2, 2) if i else (1, 1)
        layout = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(x, p["kernel"], strides, "SAME", dimension_numbers=layout)
        x = jax.nn.relu(x + p["b"])
    return x.reshape(len(x), -1) @ params["head"] + params["head_bias"]


CONVOLUTION = classifier(
    name="convolution",
    title="Convolutional network of three layers, digits",
    initial=initial,
    logits=logits,
)
