"""Blocks whose activations are kept, and the same blocks recomputed in the backward pass.

Wide enough for NF4, whose scales are of 64 inputs.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from torch import nn

from parity_tests.layout import Twin
from parity_tests.problem import Data, Problem
from torch_ref.memory import Recomputed

WIDTH, HIDDEN, OUTPUTS, BLOCKS, ROWS = 64, 128, 4, 3, 16
PACKED = r"blocks\.\d+\.(up|down)"  # modules that an NF4 base has in four bits


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(self.up(x).tanh())


class _Net(nn.Module):
    def __init__(self, *, recompute: bool):
        super().__init__()
        self.blocks = nn.ModuleList([_Block() for _ in range(BLOCKS)])
        self.head = nn.Linear(WIDTH, OUTPUTS)
        self.recompute = recompute

    def forward(self, x):
        for block in self.blocks:
            # wrapped here, so that layers have the same names either way
            x = Recomputed(block)(x) if self.recompute else block(x)
        return self.head(x)


def _scanned(*, recompute: bool) -> Any:
    def block(x: Any, p: Any) -> Any:
        hidden = jnp.tanh(x @ p["up"]["kernel"] + p["up"]["bias"])
        return x + hidden @ p["down"]["kernel"], None

    body = jax.checkpoint(block) if recompute else block

    def apply(p: Any, x: Any) -> Any:
        x, _ = jax.lax.scan(body, x, p["blocks"])
        return x @ p["head"]["kernel"] + p["head"]["bias"]

    return apply


def _stacked(name: str, n_in: int, n_out: int, *, bias: bool) -> Twin:
    path = f"blocks/{name}"
    return Twin(
        f"{path}/kernel",
        tuple(f"blocks.{i}.{name}" for i in range(BLOCKS)),
        "dense",
        (n_out, n_in),
        f"{path}/kernel",
        f"{path}/bias" if bias else None,
    )


def _classes(seed: int) -> Data:
    x = np.random.default_rng([31, seed]).normal(size=(ROWS, WIDTH))
    return Data(x, x, np.random.default_rng([32, seed]).integers(0, OUTPUTS, size=ROWS))


KEPT = Problem(
    lambda: _Net(recompute=False),
    lambda: _scanned(recompute=False),
    (
        _stacked("up", WIDTH, HIDDEN, bias=True),
        _stacked("down", HIDDEN, WIDTH, bias=False),
        Twin("head/kernel", ("head",), "dense", (OUTPUTS, WIDTH), "head/kernel", "head/bias"),
    ),
    _classes,
    options=(("expand", "joint"),),
)
RECOMPUTED = dataclasses.replace(
    KEPT,
    reference=lambda: _Net(recompute=True),
    apply=lambda: _scanned(recompute=True),
)
