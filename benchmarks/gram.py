"""Gram matrices of gradients beside ``vmap(grad)`` and a product, in CPU time and bytes.

Run: python -m benchmarks.gram [--runs 15] [--json FILE]

Three programs with one output, in float32: a perceptron 64-256-256-10 whose outputs are weighed and
summed, 256 rows; a block of attention and a feed-forward layer of width 192, 48 sequences of 8; and
the same block of width 64, 64 sequences of 32, where pairs of positions cost more than gradients.
Both sides are compiled, and run by turns; the least CPU time of each counts. Errors are relative to
the largest entry of the product in float64.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxkfac as jk
from benchmarks._record import shown, stamp, write

HEADS = 4


class Case(NamedTuple):
    """A model with one number for each example, its parameters and its inputs."""

    apply_fn: Callable[[Any, Any], Any]
    params: Any
    inputs: Any


def perceptron(params: Any, x: Any) -> Any:
    for layer in params["layers"][:-1]:
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
    last = params["layers"][-1]
    return (x @ last["kernel"] + last["bias"]) @ jnp.cos(jnp.arange(10, dtype=x.dtype))


def dense(params: Any, x: Any) -> Any:
    return x @ params["kernel"] + params["bias"]


def attention(params: Any, x: Any) -> Any:
    """Attention and a feed-forward layer, both residual, with norms without parameters."""

    def normalised(x: Any) -> Any:
        return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)

    h = normalised(x)
    q, k, v = (dense(params[name], h).reshape(*x.shape[:2], HEADS, -1) for name in "qkv")
    mix = jnp.einsum("nshk,nthk->nhst", q, k) * (q.shape[-1] ** -0.5)
    mixed = jnp.einsum("nhst,nthk->nshk", jax.nn.softmax(mix), v)
    x = x + dense(params["o"], mixed.reshape(x.shape))
    h = jnp.tanh(dense(params["up"], normalised(x)))
    return (x + dense(params["down"], h)).mean((1, 2))


def cases() -> dict[str, Case]:
    """The programs by name."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    def layer(n_in: int, n_out: int) -> Any:
        return {"kernel": normal(n_in, n_out) / n_in**0.5, "bias": 0.1 * normal(n_out)}

    def block(width: int) -> Any:
        sizes = dict.fromkeys("qkvo", (width, width))
        sizes |= {"up": (width, 4 * width), "down": (4 * width, width)}
        return {name: layer(*size) for name, size in sizes.items()}

    layers = [layer(*sides) for sides in ((64, 256), (256, 256), (256, 10))]
    return {
        "perceptron": Case(perceptron, {"layers": layers}, normal(256, 64)),
        "attention": Case(attention, block(192), normal(48, 8, 192)),
        "attention_long": Case(attention, block(64), normal(64, 32, 64)),
    }


def measure(case: Case, runs: int) -> dict[str, float]:
    """All figures of one program."""
    apply_fn, params, inputs = case
    objective = jk.Objective(apply_fn, jk.Gaussian())
    batch = inputs, jnp.zeros(len(inputs), jnp.float32)

    def of_gradients(params: Any, batch: Any) -> Any:
        def gradient(x: Any) -> Any:
            return jax.grad(lambda params: apply_fn(params, x[None])[0])(params)

        leaves = jax.tree.leaves(jax.vmap(gradient)(batch[0]))
        rows = jnp.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], 1)
        return jnp.matmul(rows, rows.T, precision="highest")

    def of_library(params: Any, batch: Any) -> Any:
        return jk.gram(objective, params, batch)

    programs = [jax.jit(f).lower(params, batch).compile() for f in (of_gradients, of_library)]
    least = [float("inf")] * 2
    for _ in range(runs):
        for k, run in enumerate(programs):
            start = time.process_time()
            jax.block_until_ready(run(params, batch))
            least[k] = min(least[k], time.process_time() - start)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: x.astype(jnp.float64), (params, batch))
        exact = jax.jit(of_gradients)(*wide)
        errors = [
            float(jnp.abs(run(params, batch).astype(jnp.float64) - exact).max() / exact.max())
            for run in programs
        ]
    bytes_of = [run.memory_analysis().temp_size_in_bytes for run in programs]
    print(jk.jacobian(objective, params, batch).plan())
    return {
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "rows": len(inputs),
        "gradients_ms": 1e3 * least[0],
        "gram_ms": 1e3 * least[1],
        "time_ratio": least[1] / least[0],
        "gradients_temp_mib": bytes_of[0] / 2**20,
        "gram_temp_mib": bytes_of[1] / 2**20,
        "bytes_ratio": bytes_of[1] / bytes_of[0],
        "gradients_error": errors[0],
        "gram_error": errors[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=15, help="runs of each side (default 15)")
    parser.add_argument("--cases", nargs="*", default=list(cases()), help="which programs")
    parser.add_argument("--json", type=Path, help="write the record here")
    args = parser.parse_args()
    record: dict[str, Any] = stamp(runs=args.runs)
    for name in args.cases:
        record[name] = measure(cases()[name], args.runs)
        shown(name, record[name])
    write(record, args.json)


if __name__ == "__main__":
    main()
