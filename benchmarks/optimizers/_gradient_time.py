"""CPU and wall milliseconds of a problem's gradient, by JAX's version: peers have another one.

Run: python -m benchmarks.optimizers._gradient_time poisson (and with ``ENV/bin/python``)
"""

import os
import sys
import time

import jax
import jax.numpy as jnp

from benchmarks.optimizers._problem import unmarked
from benchmarks.optimizers.problems import PROBLEMS

CALLS = 50


def main() -> None:
    problem = PROBLEMS[sys.argv[1]]
    params = jax.tree.map(jnp.asarray, problem.initial(0))
    batch = jax.tree.map(jnp.asarray, problem.batch(problem.data(), 0, 0))
    gradient = jax.jit(lambda params, batch: jax.grad(problem.loss)(params, batch, unmarked))
    jax.block_until_ready(gradient(params, batch))  # compiles
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(CALLS):
        jax.block_until_ready(gradient(params, batch))
    spent = time.process_time() - cpu, time.perf_counter() - wall
    said = " ".join(f"{1e3 * x / CALLS:.3g}" for x in spent)
    print(jax.__version__, os.environ.get("XLA_FLAGS", ""), said)


if __name__ == "__main__":
    main()
