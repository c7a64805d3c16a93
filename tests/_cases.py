"""One small case for each way in which a model uses a layer, for tests over all of them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests._programs import (
    attention,
    attention_params,
    labels,
    mlp,
    mlp_params,
    normal,
    recurrent,
    recurrent_unrolled,
    rms,
    scanned,
    scanned_params,
    tree,
    unrolled,
)
from tests._taps import Model


class Case(NamedTuple):
    model: Model
    plain: Model  # the same without loops
    params: dict
    batch: tuple


def grouped_query(p, x, tap):
    """Four query heads, of which each two share a key and a value head."""
    n, s, _ = x.shape

    def project(name):
        y = jnp.einsum("nsd,dhk->nshk", x, p[name])
        return tap.dense(name, x, y.reshape(n, s, -1)).reshape(y.shape)

    q, key, v = project("q").reshape(n, s, 2, 2, -1), project("k"), project("v")
    mix = jax.nn.softmax(jnp.einsum("nsghk,ntgk->nghst", q, key), axis=-1)
    y = jnp.einsum("nghst,ntgk->nsghk", mix, v).reshape(n, s, 4, -1)
    x = x + tap.dense("o", y, jnp.einsum("nshk,hkd->nsd", y, p["o"]), in_axes=2)
    return tap.dense("head", x, x @ p["head"])


def _shared_block(p, x, tap):
    """Token mixing and a feed-forward layer with a norm, as in a transformer."""
    h = tap.scale("norm", rms(x), rms(x) * p["norm"], shape=(4,))
    h = jnp.tanh(tap.dense("up", h, h @ p["up"] + p["up_bias"], bias=True))
    mix = jax.nn.softmax(jnp.einsum("nsd,ntd->nst", x, x), axis=-1)
    return x + mix @ tap.dense("down", h, h @ p["down"])


def shared_layers(p, x, tap):
    """As in ALBERT: one block, three times."""
    x, _ = lax.scan(lambda x, _: (_shared_block(p, x, tap), None), x, None, length=3)
    return x @ p["head"]


def shared_layers_unrolled(p, x, tap):
    for _ in range(3):
        x = _shared_block(p, x, tap)
    return tap.dense("head", x, x @ p["head"])


def embedded(p, ids, tap):
    """Token and position embeddings, a class token, a norm with scale and bias."""
    x = tap.embedding("table", ids, p["table"][ids], size=7)
    x = tap.lone_bias("places", x + p["places"], shape=(3, 4), row_axes=1)
    first = jnp.broadcast_to(p["token"], (len(ids), 1, 4))
    first = tap.lone_bias("token", first, shape=(1, 1, 4), row_axes=1)
    x = jnp.concatenate([first, x], axis=1)
    h = x - x.mean(-1, keepdims=True)
    h = tap.scale("scale", h, h * p["scale"], shape=(4,))
    h = tap.lone_bias("shift", h + p["shift"], shape=(4,))
    h = jnp.tanh(tap.dense("w", h, h @ p["w"] + p["b"], bias=True)).mean(axis=1)
    return tap.dense("head", h, h @ p["head"])


def nested(p, x, tap):
    def inner(x, w):
        h = rms(x) * w["scale"] + w["shift"]
        return x + jnp.tanh(h @ w["kernel"]), None

    x, _ = lax.scan(jax.checkpoint(lambda x, w: (lax.scan(inner, x, w)[0], None)), x, p["b"])
    return x.sum(axis=1) @ p["head"]


def nested_unrolled(p, x, tap):
    for at in np.ndindex(2, 2):
        w = jax.tree.map(lambda v, at=at: v[at], p["b"])
        h = tap.scale("b/scale", rms(x), rms(x) * w["scale"], shape=(4,), at=at)
        h = tap.lone_bias("b/shift", h + w["shift"], shape=(4,), at=at)
        x = x + jnp.tanh(tap.dense("b/kernel", h, h @ w["kernel"], at=at))
    x = x.sum(axis=1)
    return tap.dense("head", x, x @ p["head"])


def experts(p, x, tap):
    h = jnp.einsum("ensi,eio->enso", jnp.stack([x, jnp.sin(x)]), p["w"]) + p["b"][:, None, None]
    gate = jax.nn.softmax(x @ p["gate"], axis=-1)
    return jnp.einsum("enso,nse->nso", h, gate)


def experts_unrolled(p, x, tap):
    h = jnp.stack([
        tap.dense("w", y, y @ p["w"][e] + p["b"][e], at=(e,), bias=True)
        for e, y in enumerate((x, jnp.sin(x)))
    ])  # fmt: skip
    gate = jax.nn.softmax(tap.dense("gate", x, x @ p["gate"]), axis=-1)
    return jnp.einsum("enso,nse->nso", h, gate)


def uneven_uses(p, x, tap):
    """One parameter for tokens, and for their mean."""
    h = jnp.tanh(tap.dense("w", x, x @ p["w"] + p["b"], bias=True)).mean(axis=1)
    h = tap.dense("w", h, h @ p["w"] + p["b"], bias=True)
    return tap.dense("head", h, h @ p["head"])


def one_table(p, ids, tap):
    """Two streams of tokens read one table, and both use one layer."""
    first = tap.embedding("table", ids, p["table"][ids], size=7)
    moved = (ids[:, 1:] + 2) % 7
    second = tap.embedding("table", moved, p["table"][moved], size=7)
    h = jnp.concatenate([first, jnp.sin(second)], axis=1)
    h = jnp.tanh(tap.dense("w", h, h @ p["w"] + p["b"], bias=True)).sum(axis=1)
    return tap.dense("head", h, h @ p["head"])


def experts_on_one_input(p, x, tap):
    """Every expert sees every row: read as one layer with the experts among its outputs."""
    y = jnp.einsum("nsi,eio->nseo", x, p["w"])
    y = tap.dense("w", x, y.reshape(*x.shape[:2], -1)).reshape(y.shape)
    gate = jax.nn.softmax(tap.dense("gate", x, x @ p["gate"]), axis=-1)
    return jnp.einsum("nseo,nse->nso", jnp.cumsum(y, axis=1), gate)


def case(name: str) -> Case:
    """The case called ``name``; made inside a test, so that its arrays have the test's dtype."""
    x, per_token, per_example = normal(1, 3, 3, 4, scale=1.0), labels(2, 3, 3), labels(2, 3)
    if name == "rows":
        return Case(mlp, mlp, mlp_params(), (x, per_token))
    if name == "one row":
        return Case(mlp, mlp, mlp_params(), (normal(1, 5, 4), labels(2, 5)))
    if name == "attention":
        return Case(attention, attention, attention_params(), (x, per_token))
    if name == "grouped queries":
        p = tree(41, q=(4, 4, 2), k=(4, 2, 2), v=(4, 2, 2), o=(4, 2, 4), head=(4, 3))
        return Case(grouped_query, grouped_query, p, (x, per_token))
    if name == "scan":
        return Case(scanned, unrolled, scanned_params(), (x, per_token))
    if name == "nested scan":
        p = tree(27, b__scale=(2, 2, 4), b__shift=(2, 2, 4), b__kernel=(2, 2, 4, 4), head=(4, 3))
        return Case(nested, nested_unrolled, p, (x, per_example))
    if name == "recurrent":
        p = tree(26, w=(4, 4), u=(4, 4), b=(4,), head=(4, 3))
        return Case(recurrent, recurrent_unrolled, p, (x, per_example))
    if name == "shared layers":
        p = tree(42, norm=(4,), up=(4, 5), up_bias=(5,), down=(5, 4), head=(4, 3))
        return Case(shared_layers, shared_layers_unrolled, p, (x, per_token))
    if name == "embedded":
        p = tree(
            43, table=(7, 4), places=(3, 4), token=(1, 1, 4), scale=(4,), shift=(4,),
            w=(4, 5), b=(5,), head=(5, 3),
        )  # fmt: skip
        return Case(embedded, embedded, p, (labels(1, 4, 3, classes=7), labels(2, 4)))
    if name == "experts":
        p = tree(44, w=(2, 4, 3), b=(2, 3), gate=(4, 2))
        return Case(experts, experts_unrolled, p, (x, per_token))
    if name == "uneven uses":
        p = tree(45, w=(4, 4), b=(4,), head=(4, 3))
        return Case(uneven_uses, uneven_uses, p, (x, per_example))
    if name == "one table":
        p = tree(46, table=(7, 4), w=(4, 5), b=(5,), head=(5, 3))
        return Case(one_table, one_table, p, (labels(1, 4, 3, classes=7), labels(2, 4)))
    if name == "experts on one input":
        p = tree(47, w=(2, 4, 3), gate=(4, 2))
        return Case(experts_on_one_input, experts_on_one_input, p, (x, per_token))
    raise ValueError(name)


CASES = (
    "rows", "one row", "attention", "grouped queries", "scan", "nested scan", "recurrent",
    "shared layers", "embedded", "one table", "experts", "experts on one input", "uneven uses",
)  # fmt: skip
