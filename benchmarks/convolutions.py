"""CPU time of a convolution's gradient outside of a branch and in one, and of collecting at times.

Run: python -m benchmarks.convolutions

XLA's CPU compiler gives a convolution to its fast kernel in the outermost computation of a program
alone, or in one order of axes; see :func:`jaxkfac.interception.fast_convolutions`.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jaxkfac as jk
from jaxkfac.interception import fast_convolutions

SHAPE, WIDTH, CLASSES = (64, 28, 28, 16), 16, 10


def model(params: Any, x: jax.Array) -> jax.Array:
    """Two convolutions and a product."""
    for kernel in params["kernels"]:
        numbers = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)
        x = jax.nn.relu(x)
    return x.mean((1, 2)) @ params["head"]


def seconds(fn: Callable[..., Any], *args: Any) -> float:
    """Median of five."""
    program, times = jax.jit(fn).lower(*args).compile(), []
    for _ in range(6):
        begun = time.process_time()
        jax.block_until_ready(program(*args))
        times.append(time.process_time() - begun)
    return statistics.median(times[1:])


def main() -> None:
    keys = jax.random.split(jax.random.key(0), 4)
    kernels = [0.1 * jax.random.normal(key, (3, 3, WIDTH, WIDTH)) for key in keys[:2]]
    params = {"kernels": kernels, "head": jax.random.normal(keys[2], (WIDTH, CLASSES))}
    batch = jax.random.normal(keys[3], SHAPE), jnp.arange(SHAPE[0]) % CLASSES
    objective = jk.Objective(model, jk.Categorical())
    gradient, stats = (
        jax.value_and_grad(objective),
        jk.value_grad_and_factors(objective, every=4),
    )

    def branch(fn: Callable[..., Any]) -> Callable[..., Any]:
        nothing = lambda params, batch: (0.0, params)
        return lambda due, *args: jax.lax.cond(due, fn, nothing, *args)

    at = lambda step, params, batch: stats(params, batch, step=step)
    alone = seconds(gradient, params, batch)
    for name, found in {
        "in a branch": seconds(branch(gradient), True, params, batch),
        "in a branch, transposed": seconds(
            branch(fast_convolutions(gradient)), True, params, batch
        ),
        "every=4, a step that collects": seconds(at, 0, params, batch),
        "every=4, a step that does not": seconds(at, 1, params, batch),
    }.items():
        print(f"{name}: {found / alone:.2f} of the gradient's {1e3 * alone:.1f} CPU ms")


if __name__ == "__main__":
    main()
