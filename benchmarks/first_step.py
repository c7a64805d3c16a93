"""CPU seconds of the first K-FAC step of the autoencoder: of its parts, and of the least there is.

Run: python -m benchmarks.first_step [--json FILE]

The program is that of :mod:`benchmarks.optimizer_steps`, with its fixed settings. Each part is
traced and compiled in a process of its own, and of its program there are the kernels and calls that
XLA's CPU compiler makes of it. "bare" is the least that such an update can be: of each factor a
Cholesky factorisation and two triangular solves, of each layer two products; no averages, no
refresh that is due at some steps only, no momentum, no check of anything.
"""

import argparse
import collections
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jaxkfac as jk
from benchmarks._record import shown, stamp, write
from benchmarks.optimizer_steps import (
    CONSTRAINT,
    DAMPING,
    PERIOD,
    RATE,
    Problem,
    autoencoder,
    problem,
    rows,
)
from jaxkfac.curvature import invert, precondition

_OPERATION = re.compile(r" = (?:\([^=]*?\)|\S+) ([a-z][a-z-]*)\(")  # of a tuple, perhaps
_COUNTED = ("fusion", "copy", "custom-call", "dot", "while", "conditional", "reduce")


def bare(grads: Any, factors: Any) -> Any:
    """The products of the damped inverses, by the equations alone."""

    def inverse(matrix: Any) -> Any:
        identity = jnp.eye(len(matrix), dtype=matrix.dtype)
        lower = jax.lax.linalg.cholesky(matrix + DAMPING * identity, symmetrize_input=False)
        half = jax.lax.linalg.triangular_solve(lower, identity, left_side=True, lower=True)
        return jax.lax.linalg.triangular_solve(
            lower, half, left_side=True, lower=True, transpose_a=True
        )

    out = []
    for grad, layer in zip(grads, factors.layers, strict=True):
        both = jnp.concatenate([grad["w"], grad["b"][None]])
        a, g = inverse(factors.a_sums[layer.name]), inverse(factors.g_sums[layer.name])
        out.append(a @ both @ g)
    return out


def parts(data: Problem) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Each part, and the shapes of its arguments."""
    params = [{"w": jnp.asarray(w), "b": jnp.zeros(w.shape[1])} for w in data.weights]
    stats = jk.value_grad_and_factors(jk.Objective(autoencoder, jk.Bernoulli()), fisher="mc")
    batch, key = (jnp.asarray(rows(data.images, 0)),) * 2, jax.random.key(0)
    like = stats.factor_shapes(params, batch, key)
    shared: Any = {"damping": DAMPING, "damping_mode": "pi"}
    tx = jk.kfac(RATE, like=like, refresh_every=PERIOD, norm_constraint=CONSTRAINT, **shared)
    state = jax.eval_shape(tx.init, params)

    def update(grads: Any, state: Any, params: Any, factors: Any) -> Any:
        return tx.update(grads, state, params, factors=factors)

    def step(params: Any, state: Any, batch: Any, key: Any) -> Any:
        value, grads, factors = stats(params, batch, key)
        updates, state = tx.update(grads, state, params, factors=factors)
        return jax.tree.map(jnp.add, params, updates), state, value

    return {
        "step": (step, (params, state, batch, key)),
        "gradient and factors": (stats, (params, batch, key)),
        "update": (update, (params, state, params, like)),
        "inverses and products": (
            lambda grads, factors: precondition(grads, invert(factors, **shared)),
            (params, like),
        ),
        "bare": (bare, (params, like)),
    }


def measured(function: Callable[..., Any], arguments: tuple[Any, ...]) -> dict[str, Any]:
    """CPU seconds of tracing and compiling a function, and what XLA has made of it."""
    jax.jit(jnp.sin)(1.0)  # what the first compilation of a process starts
    begun, wall = time.process_time(), time.perf_counter()
    lowered = jax.jit(function).lower(*arguments)
    traced = time.process_time()
    compiled = lowered.compile()
    out: dict[str, Any] = {
        "trace_cpu_s": traced - begun,
        "compile_cpu_s": time.process_time() - traced,
        "wall_s": time.perf_counter() - wall,
    }
    found = collections.Counter(_OPERATION.findall(compiled.as_text() or ""))
    return out | {kind: found[kind] for kind in _COUNTED}


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--part", help="this one alone, in this process")
    parser.add_argument("--json", type=Path, help="write the record here")
    args = parser.parse_args()
    if args.part is not None:
        print(json.dumps(measured(*parts(problem())[args.part])))
        return
    record = stamp()
    for name in ("step", "gradient and factors", "update", "inverses and products", "bare"):
        command = [sys.executable, "-m", "benchmarks.first_step", "--part", name]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        record[name] = json.loads(done.stdout.splitlines()[-1])
        shown(name, record[name])
    write(record, args.json)


if __name__ == "__main__":
    main()
