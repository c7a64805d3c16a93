"""Weights computed from parameters: factors of the product, diagonals of what stands behind it."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tests._programs import labels, normal
from tests._taps import PLAIN

pytestmark = pytest.mark.usefixtures("x64")


def rows():
    return normal(8, 6, 4), labels(9, 6)


def tokens():
    return normal(8, 3, 2, 4), labels(9, 3, 2)


def weight_norm(p):
    return p["v"] / jnp.linalg.norm(p["v"], axis=0, keepdims=True) * p["g"]


def spectral_norm(p):
    u = jnp.ones((1, 5)) / jnp.sqrt(5)
    for _ in range(2):
        v = u @ p["v"].T
        v = v / jnp.linalg.norm(v)
        u = v @ p["v"]
        u = u / jnp.linalg.norm(u)
    u, v = lax.stop_gradient((u, v))
    return p["v"] / (v @ p["v"] @ u.T)[0, 0] * p["g"]


def power_iteration(p):
    """The same in a loop, whose state is a function of the parameter."""

    def step(_, u):
        u = p["v"].T @ (p["v"] @ u)
        return u / jnp.linalg.norm(u)

    u = lax.fori_loop(0, 3, step, jnp.ones(5))
    return p["v"] / jnp.linalg.norm(p["v"] @ u) * p["g"]


def standardised(p):
    mean, var = p["v"].mean(0, keepdims=True), p["v"].var(0, keepdims=True)
    return (p["v"] - mean) * lax.rsqrt(var * 4 + 1e-4) * p["g"]


def low_rank(p):
    return normal(7, 4, 5) + 0.5 * p["a"] @ (p["b"] * p["g"])


def attention_mask(p):
    return jax.nn.softmax(p["m"], axis=0) * p["v"] * p["g"]


V, G = {"v": (4, 5)}, {"g": (5,)}
WEIGHTS = {
    "weight norm": (weight_norm, V | G, "v@effective"),
    "spectral norm": (spectral_norm, V | G, "v@effective"),
    "spectral norm, in a loop": (power_iteration, V | G, "v@effective"),
    "weight standardisation": (standardised, V | G, "v@effective"),
    "merged adapter, frozen base": (low_rank, {"a": (4, 2), "b": (2, 5)} | G, "b@effective"),
    "softmax mask": (attention_mask, V | G | {"m": (4, 5)}, "m@effective"),
}


def network(weight, name, wall=lambda f: f):
    def model(p, x, tap):
        w = weight(p)
        y = x @ w if tap is PLAIN else tap.dense(name, x, x @ w)
        y = jnp.tanh(y if tap is PLAIN else tap.lone_bias("bias", y + p["bias"], shape=(5,)))
        return tap.dense("head", y, y @ p["head"])

    def program(p, x, tap):
        def plain(p, x):
            return jnp.tanh(x @ weight(p) + p["bias"]) @ p["head"]

        return wall(plain)(p, x)

    return program, model
