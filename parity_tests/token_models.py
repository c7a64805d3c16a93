"""Tokens: an embedding, attention that knows of padding, and a head for every position."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

import jaxkfac as jk
from parity_tests.layout import Twin
from parity_tests.problem import EXPAND, Data, Problem

WORDS, WIDTH, HEADS, HIDDEN, EXAMPLES, LENGTH = 5, 4, 2, 6, 14, 5
UNREAD = -100  # the target of a token without loss, as collators write it
LOW = -1e9  # what absent keys score: their probability underflows to zero on both sides


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH)  # biases here and not there: two input factors
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens, exists=None):
        x = self.embed(tokens)
        q, k, v = (
            layer(x).unflatten(-1, (HEADS, -1)) for layer in (self.query, self.key, self.value)
        )
        scores = torch.einsum("nshk,nthk->nhst", q, k) / (WIDTH // HEADS) ** 0.5
        if exists is not None:
            scores = scores.masked_fill(~exists[:, None, None], LOW)
        mixed = torch.einsum("nhst,nthk->nshk", scores.softmax(-1), v)
        x = x + self.out(mixed.flatten(-2))
        return self.head(x + self.down(self.up(x).tanh()))


def _block(*, mark: bool = False) -> Any:
    def apply(p: Any, inputs: Any) -> Any:
        tokens, exists = inputs["tokens"], inputs.get("exists")
        if mark:
            tokens = jk.mark_rows(tokens, exists)
        x = p["embed"]["embedding"][tokens]

        def project(name: str) -> Any:
            y = jnp.einsum("nsd,dhk->nshk", x, p[name]["kernel"])
            return y + p[name]["bias"] if "bias" in p[name] else y

        q, k, v = map(project, ("query", "key", "value"))
        scores = jnp.einsum("nshk,nthk->nhst", q, k) / (WIDTH // HEADS) ** 0.5
        if exists is not None:
            scores = jnp.where(exists[:, None, None], scores, jnp.asarray(LOW, scores.dtype))
        mixed = jnp.einsum("nhst,nthk->nshk", jax.nn.softmax(scores, axis=-1), v)
        y = x + jnp.einsum("nshk,hkd->nsd", mixed, p["out"]["kernel"])
        hidden = jnp.tanh(y @ p["up"]["kernel"] + p["up"]["bias"])
        # in brackets: a bias added to a sum of two branches belongs to neither product
        y = y + (hidden @ p["down"]["kernel"] + p["down"]["bias"])
        return y @ p["head"]["kernel"] + p["head"]["bias"]

    return apply


def _projection(name: str, *, bias: bool) -> Twin:
    shape = (WIDTH, HEADS, WIDTH // HEADS)
    path = f"{name}/bias" if bias else None
    return Twin(
        f"{name}/kernel", (name,), "dense", (WIDTH, WIDTH), f"{name}/kernel", path,
        kernel_shape=shape, bias_shape=shape[1:],
    )  # fmt: skip


def _dense(name: str, n_in: int, n_out: int) -> Twin:
    return Twin(f"{name}/kernel", (name,), "dense", (n_out, n_in), f"{name}/kernel", f"{name}/bias")


EMBED = Twin("embed/embedding", ("embed",), "embedding", (WORDS, WIDTH), "embed/embedding")
TWINS = (
    EMBED,
    _projection("query", bias=True),
    _projection("key", bias=False),
    _projection("value", bias=True),
    Twin(
        "out/kernel",
        ("out",),
        "dense",
        (WIDTH, WIDTH),
        "out/kernel",
        kernel_shape=(HEADS, WIDTH // HEADS, WIDTH),
    ),
    _dense("up", WIDTH, HIDDEN),
    _dense("down", HIDDEN, WIDTH),
    _dense("head", WIDTH, WORDS),
)


def _whole(seed: int) -> Data:
    rng = np.random.default_rng([21, seed])
    tokens, targets = rng.integers(0, WORDS, size=(2, EXAMPLES, LENGTH))
    return Data({"tokens": tokens}, {"tokens": tokens}, targets)


def _padded(seed: int) -> Data:
    """Padding at the end; and prompts, whose tokens exist but have no loss."""
    whole, rng = _whole(seed), np.random.default_rng([22, seed])
    lengths = rng.integers(2, LENGTH + 1, size=EXAMPLES)
    prompts = rng.integers(0, 2, size=EXAMPLES)
    place = np.arange(LENGTH)
    exists = place < lengths[:, None]
    inputs = whole.inputs | {"exists": exists}
    mask = exists & (place >= prompts[:, None])
    return Data(inputs, inputs, np.where(mask, whole.targets, UNREAD), mask, exists)


KEYS = ("key/kernel",)
TOKENS = Problem(_Block, _block, TWINS, _whole, zero_under_reduce=KEYS)
MASKED = Problem(_Block, _block, TWINS, _padded, zero_under_reduce=KEYS)
MARKED = Problem(_Block, lambda: _block(mark=True), TWINS, _padded, options=EXPAND, marks=True)


# ---------------------------------------------------------------- head tied to the embedding


class _Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.up(self.embed(tokens)).tanh())


def _tied() -> Any:
    def apply(p: Any, inputs: Any) -> Any:
        table = p["embed"]["embedding"]
        x = jnp.tanh(table[inputs["tokens"]] @ p["up"]["kernel"] + p["up"]["bias"])
        return x @ table.T

    return apply


TIED = Problem(
    _Tied,
    _tied,
    (
        EMBED,
        _dense("up", WIDTH, WIDTH),
        Twin("embed/embedding", ("head",), "tied head", (WORDS, WIDTH), "embed/embedding"),
    ),
    _whole,
    options=EXPAND[:1],
)
