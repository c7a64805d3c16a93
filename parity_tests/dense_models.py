"""Dense layers: a perceptron under each likelihood, one layer used often, a scan."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from torch import nn

from parity_tests.layout import Twin
from parity_tests.problem import EXPAND, Data, FromNnx, Problem

INPUTS, HIDDEN, OUTPUTS, ROWS = 5, 6, 4, 24


def _dense(name: str, modules: Any, n_in: int, n_out: int, *, bias: bool = True) -> Twin:
    modules = (modules,) if isinstance(modules, str) else tuple(modules)
    return Twin(
        f"{name}/kernel",
        modules,
        "dense",
        (n_out, n_in),
        f"{name}/kernel",
        f"{name}/bias" if bias else None,
    )


# ---------------------------------------------------------------- perceptron, in Flax NNX


class _Perceptron(nn.Module):
    """A square kernel in the middle, where a transposed one would not show in its shape."""

    def __init__(self, inputs: int = INPUTS):
        super().__init__()
        self.up = nn.Linear(inputs, HIDDEN)
        self.mid = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, x):
        return self.down((self.mid(self.up(x).tanh())).tanh())


class _NnxPerceptron(nnx.Module):
    def __init__(self, inputs: int = INPUTS):
        rngs = nnx.Rngs(0)
        self.up = nnx.Linear(inputs, HIDDEN, rngs=rngs)
        self.mid = nnx.Linear(HIDDEN, HIDDEN, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, OUTPUTS, rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.tanh(self.mid(jnp.tanh(self.up(x)))))


def _twins(inputs: int = INPUTS) -> tuple[Twin, ...]:
    return (
        _dense("up", "up", inputs, HIDDEN),
        _dense("mid", "mid", HIDDEN, HIDDEN, bias=False),
        _dense("down", "down", HIDDEN, OUTPUTS),
    )


def _rows(seed: int, n: int = ROWS, features: int = INPUTS) -> np.ndarray:
    return np.random.default_rng([1, seed]).normal(size=(n, features))


def _classes(seed: int) -> Data:
    x = _rows(seed)
    targets = np.random.default_rng([2, seed]).integers(0, OUTPUTS, size=len(x))
    return Data(x, x, targets)


def _numbers(seed: int) -> Data:
    x = _rows(seed)
    return Data(x, x, np.random.default_rng([3, seed]).normal(size=(len(x), OUTPUTS)))


def _answers(seed: int) -> Data:
    x, y = _rows(seed), np.random.default_rng([4, seed]).normal(size=(ROWS, OUTPUTS))
    return Data(x, x, (y > 0).astype(float))


def _many(seed: int) -> Data:
    """So many rows that a sum of them in half precision stops growing."""
    x = _rows(seed, n=4096)
    targets = np.random.default_rng([5, seed]).integers(0, OUTPUTS, size=len(x))
    return Data(x, x, targets)


def _partly_unknown(seed: int) -> Data:
    """Of some rows nobody knows the targets, and of none in one batch."""
    data, rng = _numbers(seed), np.random.default_rng([6, seed])
    known = rng.random(ROWS) < (0.0 if seed == UNKNOWN else 0.7)
    return data._replace(targets=np.where(known[:, None], data.targets, np.nan), mask=known)


UNKNOWN = 4  # within a group of micro-batches, neither first nor last
NNX = FromNnx(_NnxPerceptron)
CLASSIFIER = Problem(_Perceptron, NNX, _twins(), _classes)
REGRESSION = Problem(_Perceptron, NNX, _twins(), _numbers, "Gaussian")
MASKED_REGRESSION = Problem(_Perceptron, NNX, _twins(), _partly_unknown, "Gaussian", EXPAND[:1])
BINARY = Problem(_Perceptron, NNX, _twins(), _answers, "Bernoulli")
WIDE = Problem(_Perceptron, NNX, _twins(), _many, options=(("expand", "joint"),))


# ---------------------------------------------------------------- one layer, three times


class _Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.Linear(INPUTS, INPUTS)
        self.head = nn.Linear(INPUTS, OUTPUTS)

    def forward(self, x):
        for _ in range(3):
            x = self.cell(x).tanh()
        return self.head(x)


def _shared() -> Any:
    def apply(p: Any, x: Any) -> Any:
        for _ in range(3):
            x = jnp.tanh(x @ p["cell"]["kernel"] + p["cell"]["bias"])
        return x @ p["head"]["kernel"] + p["head"]["bias"]

    return apply


SHARED = Problem(
    _Shared,
    _shared,
    (_dense("cell", "cell", INPUTS, INPUTS), _dense("head", "head", INPUTS, OUTPUTS)),
    _classes,
    options=EXPAND,
)


# ---------------------------------------------------------------- residual blocks, in a scan


class _Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(INPUTS, INPUTS) for _ in range(3)])
        self.head = nn.Linear(INPUTS, OUTPUTS, bias=False)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(x)


def _scanned() -> Any:
    """The same in a scan whose iterations are recomputed in the backward pass."""

    @jax.checkpoint
    def block(x: Any, p: Any) -> Any:
        return x + jnp.tanh(x @ p["kernel"] + p["bias"]), None

    def apply(p: Any, x: Any) -> Any:
        return jax.lax.scan(block, x, p["blocks"])[0] @ p["head"]["kernel"]

    return apply


SCANNED = Problem(
    _Blocks,
    _scanned,
    (
        _dense("blocks", [f"blocks.{i}" for i in range(3)], INPUTS, INPUTS),
        _dense("head", "head", INPUTS, OUTPUTS, bias=False),
    ),
    _classes,
)


# ---------------------------------------------------------------- several axes, in a scan

HEADS, WIDTH = 2, 3


class _Projections(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(INPUTS, HEADS * WIDTH)
        self.o_proj = nn.Linear(HEADS * WIDTH, INPUTS, bias=False)


class _Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = _Projections()

    def forward(self, x):
        return x + self.attn.o_proj(torch.tanh(self.attn.q_proj(x)))


class _Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([_Layer(), _Layer(), _Layer()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def _projections() -> Any:
    """The same scanned; heads are an axis of their own."""

    def block(x: Any, p: Any) -> Any:
        q, o = p["q_proj"], p["o_proj"]
        h = jnp.tanh(jnp.einsum("nd,dhk->nhk", x, q["kernel"]) + q["bias"])
        return x + jnp.einsum("nhk,hkd->nd", h, o["kernel"]), None

    return lambda p, x: jax.lax.scan(block, x, p["layers"]["attn"])[0]


def _projection(name: str, n_in: int, n_out: int, *, bias: bool, **shapes: Any) -> Twin:
    modules = [f"layers.{i}.attn.{name}" for i in range(3)]
    twin = _dense(f"layers/attn/{name}", modules, n_in, n_out, bias=bias)
    return dataclasses.replace(twin, **shapes)


PROJECTIONS = Problem(
    _Layers,
    _projections,
    (
        _projection(
            "q_proj",
            INPUTS,
            HEADS * WIDTH,
            bias=True,
            kernel_shape=(INPUTS, HEADS, WIDTH),
            bias_shape=(HEADS, WIDTH),
        ),
        _projection(
            "o_proj", HEADS * WIDTH, INPUTS, bias=False, kernel_shape=(HEADS, WIDTH, INPUTS)
        ),
    ),
    _classes,
    options=(("expand", "joint"),),
)
