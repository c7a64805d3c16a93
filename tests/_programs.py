"""Small programs and data that several tests share, written with taps (see `_oracle`)."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def normal(seed, *shape, scale=0.5):
    return jnp.asarray(scale * np.random.default_rng(seed).normal(size=shape))


def tree(seed, **shapes):
    """``{name: normal array}``; a double underscore in a name makes a level."""
    out: dict = {}
    for i, (name, shape) in enumerate(shapes.items()):
        *parents, leaf = name.split("__")
        node = out
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = normal(100 * seed + i, *shape)
    return out


def labels(seed, *shape, classes=3):
    return jnp.asarray(np.random.default_rng(seed).integers(0, classes, size=shape))


# ------------------------------------------------------------------ programs


def mlp(p, x, tap):
    h = tap.dense("up/kernel", x, x @ p["up"]["kernel"] + p["up"]["bias"], bias=True)
    h = jnp.tanh(h)
    return tap.dense("down/kernel", h, h @ p["down"]["kernel"] + p["down"]["bias"], bias=True)


def mlp_params(seed=0, i=4, h=5, o=3):
    return tree(seed, up__kernel=(i, h), up__bias=(h,), down__kernel=(h, o), down__bias=(o,))


def rms(x):
    return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def attention(p, x, tap):
    """One block over tokens (n, s, d): norm, attention with heads, head over classes."""
    d, heads, k = p["q"].shape
    scaled = tap.scale("norm", rms(x), rms(x) * p["norm"], shape=(d,))
    q, key, v = (
        tap.dense(
            name, scaled, jnp.einsum("nsd,dhk->nshk", scaled, p[name]).reshape(*x.shape[:2], -1)
        )
        for name in ("q", "k", "v")
    )
    q, key, v = (t.reshape(*x.shape[:2], heads, k) for t in (q, key, v))
    mix = jax.nn.softmax(jnp.einsum("nshk,nthk->nhst", q, key) / np.sqrt(k), axis=-1)
    y = jnp.einsum("nhst,nthk->nshk", mix, v)
    x = x + tap.dense("o", y, jnp.einsum("nshk,hkd->nsd", y, p["o"]), in_axes=2)
    return tap.dense("head", x, x @ p["head"] + p["head_bias"], bias=True)


def attention_params(seed=1, d=4, heads=2, k=3, classes=3):
    return tree(
        seed,
        norm=(d,), q=(d, heads, k), k=(d, heads, k), v=(d, heads, k), o=(heads, k, d),
        head=(d, classes), head_bias=(classes,),
    )  # fmt: skip


def scanned(p, x, tap):
    """A stack of residual blocks in a scan of remat of jit."""

    @jax.checkpoint
    def block(x, w):
        return x + jax.jit(lambda x: jnp.tanh(x @ w["kernel"] + w["bias"]))(x), None

    x, _ = lax.scan(block, x, p["blocks"])
    return tap.dense("head", x, x @ p["head"])


def unrolled(p, x, tap):
    for i in range(p["blocks"]["kernel"].shape[0]):
        kernel, bias = p["blocks"]["kernel"][i], p["blocks"]["bias"][i]
        x = x + jnp.tanh(tap.dense("blocks/kernel", x, x @ kernel + bias, at=(i,), bias=True))
    return tap.dense("head", x, x @ p["head"])


def scanned_params(length=3):
    return tree(23, blocks__kernel=(length, 4, 4), blocks__bias=(length, 4), head=(4, 3))


def recurrent(p, x, tap):
    def step(h, x):
        return jnp.tanh(x @ p["w"] + h @ p["u"] + p["b"]), None

    h = jnp.zeros((x.shape[0], p["u"].shape[0]), x.dtype)
    h, _ = lax.scan(step, h, jnp.swapaxes(x, 0, 1))
    return tap.dense("head", h, h @ p["head"])


def recurrent_unrolled(p, x, tap):
    h = jnp.zeros((x.shape[0], p["u"].shape[0]), x.dtype)
    for t in range(x.shape[1]):
        z = tap.dense("w", x[:, t], x[:, t] @ p["w"]) + tap.dense("u", h, h @ p["u"])
        h = jnp.tanh(tap.lone_bias("b", z + p["b"], shape=(4,)))
    return tap.dense("head", h, h @ p["head"])
