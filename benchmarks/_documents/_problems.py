"""The small problems on which claims are measured, alike in both frameworks."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import nn

import jaxkfac as jk
from torch_ref.factors import Categorical, fisher_loss

WIDTH, DEPTH, ROWS = 128, 6, 1024
LOSS = fisher_loss(Categorical())
OBJECTIVE = jk.Objective(lambda params, x: forward(params, x), jk.Categorical())
GELU_OBJECTIVE = jk.Objective(
    lambda params, x: forward(params, x, between=jax.nn.gelu), jk.Categorical()
)


def network(
    device: str = "cpu",
    *,
    width: int = WIDTH,
    depth: int = DEPTH,
    between: Callable[[], nn.Module] = nn.Tanh,
) -> nn.Sequential:
    """Dense layers with a nonlinearity between them."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), between()]
    return nn.Sequential(*layers[:-1]).to(device)


def batch(device: str = "cpu", *, rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows, and a class for each."""
    torch.manual_seed(1)
    x, y = torch.randn(rows, WIDTH), torch.randint(WIDTH, (rows,))
    return x.to(device), y.to(device)


def parameters(*, width: int = WIDTH, depth: int = DEPTH) -> dict[str, Any]:
    """Of the same network in JAX."""
    keys = jax.random.split(jax.random.key(0), depth)
    draw = lambda key: jax.random.normal(key, (width, width)) / width**0.5
    return {
        f"layer{i:02}": {"kernel": draw(key), "bias": jnp.zeros(width)}
        for i, key in enumerate(keys)
    }


def forward(params: Any, x: jax.Array, *, between: Callable[..., Any] = jnp.tanh) -> jax.Array:
    """The network."""
    for name in params:
        x = x @ params[name]["kernel"] + params[name]["bias"]
        x = x if name == max(params) else between(x)
    return x


def jax_batch(*, rows: int = ROWS) -> tuple[jax.Array, jax.Array]:
    """The batch."""
    x = jax.random.normal(jax.random.key(1), (rows, WIDTH))
    return x, jax.random.randint(jax.random.key(2), (rows,), 0, WIDTH)


def interleaved(
    first: Callable[[], Any], second: Callable[[], Any], *, runs: int
) -> tuple[float, float]:
    """Median seconds of two programs that take turns."""
    seconds: tuple[list[float], list[float]] = ([], [])
    first(), second()
    for _ in range(runs):
        for work, taken in zip((first, second), seconds, strict=True):
            start = time.perf_counter()
            work()
            taken.append(time.perf_counter() - start)
    return statistics.median(seconds[0]), statistics.median(seconds[1])
