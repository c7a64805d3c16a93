"""A byte-level decoder of six blocks on the beginning of Moby Dick."""

import lzma
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.optimizers._problem import Arrays, Mark, Problem, glorot

TEXT = Path(__file__).with_name("moby_dick.txt.xz")
DEPTH, WIDTH, HEADS, CONTEXT, BATCH = 6, 64, 4, 64, 32
HELD_OUT = 12_800  # bytes, the last ones


def data() -> Arrays:
    """The text's bytes, of which the last 12.8 % are held out."""
    text = np.frombuffer(lzma.decompress(TEXT.read_bytes()), np.uint8).astype(np.int32)
    cut = len(text) - HELD_OUT
    lines = text[cut : cut + HELD_OUT // (CONTEXT + 1) * (CONTEXT + 1)]
    return {"train": text[:cut], "validation": lines.reshape(-1, CONTEXT + 1)}


def initial(seed: int) -> dict[str, Any]:
    """Glorot's; what goes back into the stream is smaller by the root of the depth."""
    rng = np.random.default_rng(seed)

    def block() -> dict[str, np.ndarray]:
        small = np.float32(1 / np.sqrt(2 * DEPTH))
        return {
            "norm1": np.ones(WIDTH, np.float32),
            "qkv": glorot(rng, WIDTH, 3 * WIDTH),
            "out": small * glorot(rng, WIDTH, WIDTH),
            "norm2": np.ones(WIDTH, np.float32),
            "up": glorot(rng, WIDTH, 4 * WIDTH),
            "down": small * glorot(rng, 4 * WIDTH, WIDTH),
        }

    return {
        "bytes": rng.normal(size=(256, WIDTH)).astype(np.float32) / 8,
        "positions": rng.normal(size=(CONTEXT, WIDTH)).astype(np.float32) / 8,
        "blocks": [block() for _ in range(DEPTH)],
        "norm": np.ones(WIDTH, np.float32),
        "head": glorot(rng, WIDTH, 256),
    }


def batch(data: Arrays, seed: int, step: int) -> np.ndarray:
    """Pieces of the text from anywhere, ``(BATCH, CONTEXT + 1)``."""
    starts = np.random.default_rng((seed, step)).integers(
        len(data["train"]) - CONTEXT, size=(BATCH, 1)
    )
    return data["train"][starts + np.arange(CONTEXT + 1)]


def _normed(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * scale


def _attention(x: jax.Array) -> jax.Array:
    n, t, _ = x.shape
    q, k, v = jnp.split(x.reshape(n, t, 3 * HEADS, WIDTH // HEADS), 3, axis=2)
    scores = jnp.einsum("nthd,nshd->nhts", q, k) * (WIDTH // HEADS) ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores, -1e30)
    return jnp.einsum("nhts,nshd->nthd", jax.nn.softmax(scores), v).reshape(n, t, WIDTH)


def logits(params: Any, ids: jax.Array) -> jax.Array:
    """Of the next bytes."""
    x = params["bytes"][ids] + params["positions"]
    for p in params["blocks"]:
        x = x + _attention(_normed(x, p["norm1"]) @ p["qkv"]) @ p["out"]
        x = x + jax.nn.gelu(_normed(x, p["norm2"]) @ p["up"]) @ p["down"]
    return _normed(x, params["norm"]) @ params["head"]


def _nats(z: jax.Array, ids: jax.Array) -> jax.Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(z), ids[..., None], -1).mean()


def loss(params: Any, batch: Any, mark: Mark) -> jax.Array:
    """Mean cross entropy of a byte."""
    z = mark("categorical", logits(params, batch[:, :-1]), batch[:, 1:])
    return _nats(z, batch[:, 1:])


def validate(params: Any, data: Any) -> jax.Array:
    """The same on the text held out."""
    return _nats(logits(params, data["validation"][:, :-1]), data["validation"][:, 1:])


DECODER = Problem(
    name="decoder",
    title="Byte-level decoder, 6 blocks, Moby Dick",
    measure="cross entropy of a held-out byte, nats",
    fisher="mc",
    steps=71,
    costly=True,
    budget=25.0,
    data=data,
    initial=initial,
    batch=batch,
    loss=loss,
    validate=validate,
)
