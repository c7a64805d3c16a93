"""A vision transformer of two blocks on the digits, in patches of 2 x 2 pixels."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.optimizers._digits import classifier
from benchmarks.optimizers._problem import glorot

DEPTH, WIDTH, HEADS, PATCH = 2, 64, 4, 2
TOKENS = (8 // PATCH) ** 2


def initial(seed: int) -> dict[str, Any]:
    """Glorot's."""
    rng = np.random.default_rng(seed)

    def norm() -> dict[str, np.ndarray]:
        return {"scale": np.ones(WIDTH, np.float32), "shift": np.zeros(WIDTH, np.float32)}

    def dense(n: int, m: int) -> dict[str, np.ndarray]:
        return {"w": glorot(rng, n, m), "b": np.zeros(m, np.float32)}

    def block() -> dict[str, Any]:
        return {
            "norm1": norm(),
            "qkv": dense(WIDTH, 3 * WIDTH),
            "out": dense(WIDTH, WIDTH),
            "norm2": norm(),
            "up": dense(WIDTH, 4 * WIDTH),
            "down": dense(4 * WIDTH, WIDTH),
        }

    return {
        "patches": dense(PATCH**2, WIDTH),
        "positions": 0.02 * rng.normal(size=(TOKENS, WIDTH)).astype(np.float32),
        "blocks": [block() for _ in range(DEPTH)],
        "norm": norm(),
        "head": glorot(rng, WIDTH, 10),
        "head_bias": np.zeros(10, np.float32),
    }


def _normed(x: jax.Array, p: Any) -> jax.Array:
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * p["scale"] + p["shift"]


def _attention(x: jax.Array) -> jax.Array:
    n, t, _ = x.shape
    q, k, v = jnp.split(x.reshape(n, t, 3 * HEADS, WIDTH // HEADS), 3, axis=2)
    scores = jnp.einsum("nthd,nshd->nhts", q, k) * (WIDTH // HEADS) ** -0.5
    return jnp.einsum("nhts,nshd->nthd", jax.nn.softmax(scores), v).reshape(n, t, WIDTH)


def logits(params: Any, images: jax.Array) -> jax.Array:
    """Of the classes, from the mean over the patches."""

    def dense(p: Any, x: jax.Array) -> jax.Array:
        return x @ p["w"] + p["b"]

    side = 8 // PATCH
    patches = images.reshape(-1, side, PATCH, side, PATCH).swapaxes(2, 3)
    x = dense(params["patches"], patches.reshape(-1, TOKENS, PATCH**2)) + params["positions"]
    for p in params["blocks"]:
        x = x + dense(p["out"], _attention(dense(p["qkv"], _normed(x, p["norm1"]))))
        x = x + dense(p["down"], jax.nn.gelu(dense(p["up"], _normed(x, p["norm2"]))))
    return _normed(x, params["norm"]).mean(1) @ params["head"] + params["head_bias"]


VIT = classifier(
    name="vit", title="Vision transformer of two blocks, digits", initial=initial, logits=logits
)
