"""A small net whose factors are written out by hand.

Other tests import from here; the test below holds the hand-written statistics to the gradient.
"""

import jax
import jax.numpy as jnp
import pytest

from jaxkfac.blocks import Factors
from jaxkfac.blocks._random_factors_test import layer

pytestmark = pytest.mark.usefixtures("x64")


# --- the net: two projections of the same input, one with a bias, a scale, a head

NET = (
    layer("left/kernel", (3, 4), bias="left/bias"),
    layer("right/kernel", (3, 4), input="left/kernel"),
    layer("scale", (4,), kind="scale", inputs=()),
    layer("head/kernel", (4, 2), bias="head/bias"),
)


def net_params(key, dtype=None):
    keys = jax.random.split(key, 6)
    normal = lambda i, *shape: jax.random.normal(keys[i], shape, dtype)
    return {
        "left": {"kernel": normal(0, 3, 4), "bias": normal(1, 4)},
        "right": {"kernel": normal(2, 3, 4)},
        "scale": 1 + normal(3, 4),
        "head": {"kernel": normal(4, 4, 2), "bias": normal(5, 2)},
    }


def _forward(p, x, eps):
    """The outputs, and the inputs of every layer; ``eps`` is added to every layer's output."""
    left = x @ p["left"]["kernel"] + p["left"]["bias"] + eps["left"]
    right = x @ p["right"]["kernel"] + eps["right"]
    gated = jnp.tanh(left) * right
    hidden = gated * p["scale"] + eps["scale"]
    out = hidden @ p["head"]["kernel"] + p["head"]["bias"] + eps["head"]
    return out, {"gated": gated, "hidden": hidden}


def summed_loss(p, batch, eps=None):
    x, y, mask = batch
    n = len(x)
    if eps is None:
        zeros = lambda d: jnp.zeros((n, d), x.dtype)
        eps = {"left": zeros(4), "right": zeros(4), "scale": zeros(4), "head": zeros(2)}
    out, inputs = _forward(p, x, eps)
    return jnp.where(mask, jnp.square(out - y).sum(-1) / 2, 0).sum(), inputs


@jax.jit
def net_statistics(p, batch):
    """``(gradient of the mean loss, factors)``; the gradient is 0/0 if the mask hides all."""
    x, _, mask = batch
    n, terms = len(x), mask.sum().astype(x.dtype)
    zeros = lambda d: jnp.zeros((n, d), x.dtype)
    eps = {"left": zeros(4), "right": zeros(4), "scale": zeros(4), "head": zeros(2)}
    (sums, g), inputs = jax.grad(
        lambda p, e: summed_loss(p, batch, e), argnums=(0, 1), has_aux=True
    )(p, eps)
    joint = lambda rows: jnp.concatenate([rows, jnp.ones((n, 1), x.dtype)], -1)
    gram = lambda rows: rows.T @ rows
    factors = Factors(
        a_sums={
            "left/kernel": gram(joint(x)),
            "head/kernel": gram(joint(inputs["hidden"])),
        },
        a_counts={k: jnp.asarray(n, x.dtype) for k in ("left/kernel", "head/kernel")},
        g_sums={f"{k}/kernel": gram(g[k]) for k in ("left", "right", "head")},
        diagonals={"scale": jnp.square(inputs["gated"] * g["scale"]).sum(0)},
        terms=terms,
        layers=NET,
        bias="joint",
    )
    return jax.tree.map(lambda v: v / terms, sums), factors


def net_batch(key, n, dtype=None, hidden=0.3):
    k_x, k_y, k_m = jax.random.split(key, 3)
    x, y = jax.random.normal(k_x, (n, 3), dtype), jax.random.normal(k_y, (n, 2), dtype)
    return x, y, jax.random.bernoulli(k_m, 1 - hidden, (n,))


def net_like(p, batch):
    return jax.eval_shape(net_statistics, p, batch)[1]


def test_hand_written_statistics_agree_with_autodiff():
    key = jax.random.key(0)
    params, batch = net_params(key), net_batch(key, 6)
    grads, factors = net_statistics(params, batch)
    terms = batch[2].sum().astype(float)
    expected = jax.grad(lambda p: summed_loss(p, batch)[0] / terms)(params)
    jax.tree.map(lambda a, b: _close(a, b), grads, expected)
    rows = [tuple(v[i : i + 1] for v in batch) for i in range(6) if batch[2][i]]
    singles = [jax.grad(lambda p, r=r: summed_loss(p, r)[0])(params) for r in rows]
    bias_rows = jnp.stack([s["head"]["bias"] for s in singles])
    _close(factors.g_sums["head/kernel"], bias_rows.T @ bias_rows)
    _close(factors.diagonals["scale"], sum(jnp.square(s["scale"]) for s in singles))


def _close(a, b):
    assert jnp.allclose(a, b, rtol=1e-12, atol=1e-12), (a, b)
