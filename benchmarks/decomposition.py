"""Cost of decomposing a transformer's factors: eigendecompose / the plain LAPACK calls.

Run: python -m benchmarks.decomposition [--blocks 2] [--pairs 3] [--json FILE]

The model is a transformer of d 768, hidden 3072: q, k, v, o, up and down with biases in every
block, where q, k and v read one input. Its distinct factors are, for each block, A of 769 for
q, o and up, A of 3073 for down, G of 768 for q, k, v, o and down, and G of 3072 for up: eight
of 768 or 769 and two of 3072 or 3073, where six layers without sharing would have twelve.

Against it stand the LAPACK calls alone (ssyevd, with eigenvectors, through SciPy), one for each
distinct factor. Both are timed in interleaved pairs, first for one matrix of each size, then for
the model; the ratio is the median over pairs, because machines are noisy and their noise is
shared by neighbours in time. The number of BLAS threads is read from OPENBLAS_NUM_THREADS
before jax starts, so it is one command for each.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import scipy
from flax import linen as nn
from scipy.linalg import lapack

import jaxkfac as jk
from benchmarks._record import shown, stamp, write

D, HIDDEN, TOKENS = 768, 3072, 64


class Block(nn.Module):
    """The six projections of a transformer block; attention itself has no factors."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = (nn.Dense(D, name=name)(x) for name in "qkv")
        x = x + nn.Dense(D, name="o")(jax.nn.softmax(q @ k.mT) @ v)
        return x + nn.Dense(D, name="down")(nn.gelu(nn.Dense(HIDDEN, name="up")(x)))


class Blocks(nn.Module):
    """As many blocks as asked for, not scanned."""

    blocks: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(self.blocks):
            x = Block()(x)
        return x


def factors_of(blocks: int) -> jk.Factors:
    """Full-rank factors in the model's own structure, without running the model."""
    model, x = Blocks(blocks), jax.ShapeDtypeStruct((TOKENS, D), np.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    stats = jk.value_grad_and_factors(jk.Objective(model.apply, jk.Gaussian()))
    like = stats.factor_shapes(params, (x, x))
    rng, drawn = np.random.default_rng(0), {}

    def draw(shape: jax.ShapeDtypeStruct) -> jax.Array:
        if len(shape.shape) < 2:
            return jax.numpy.ones(shape.shape, shape.dtype)
        n = shape.shape[-1]
        if n not in drawn:  # LAPACK's time depends on the size, hardly on the values
            rows = rng.normal(size=(2 * n, n)).astype(np.float32)
            drawn[n] = jax.numpy.asarray(rows.T @ rows / len(rows))
        return drawn[n] * 1.0  # arrays of their own: nothing may be decomposed once for two

    return jax.tree.map(draw, like)


def matrices_of(factors: jk.Factors) -> list[np.ndarray]:
    """The distinct matrices in LAPACK's own layout, copied: syevd overwrites them."""
    sides = [*factors.a_sums.values(), *factors.g_sums.values()]
    return [np.array(side, order="F") for side in sides]


def lapack_alone(matrices: list[np.ndarray]) -> None:
    for matrix in matrices:
        _, _, info = lapack.ssyevd(matrix, overwrite_a=0)
        if info:
            raise RuntimeError(f"ssyevd failed with info={info}")


def one_matrix(n: int) -> jk.Factors:
    """Factors of one lone dense layer whose A is ``(n, n)`` and whose G is a number."""
    fn = jk.Objective(lambda p, x: x @ p["kernel"], jk.Gaussian())
    params = {"kernel": np.zeros((n, 1), np.float32)}
    batch = (np.zeros((1, n), np.float32), np.zeros((1, 1), np.float32))
    like = jk.value_grad_and_factors(fn).factor_shapes(params, batch)
    rows = np.random.default_rng(0).normal(size=(2 * n, n)).astype(np.float32)
    gram = rows.T @ rows / len(rows)
    return jax.tree.map(
        lambda s: jax.numpy.asarray(gram if s.shape == (n, n) else np.ones(s.shape, s.dtype)), like
    )


def seconds(fn: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(fn())
    return time.perf_counter() - start


def compare(factors: jk.Factors, pairs: int) -> dict[str, float]:
    """Median seconds of both and the median ratio over interleaved pairs."""
    matrices = matrices_of(factors)
    times = []
    for _ in range(pairs):
        plain = seconds(lambda: lapack_alone(matrices))
        times.append((plain, seconds(lambda: jk.eigendecompose(factors, placement="auto"))))
    return {
        "matrices": len(matrices),
        "lapack_s": statistics.median(plain for plain, _ in times),
        "eigendecompose_s": statistics.median(ours for _, ours in times),
        "ratio": statistics.median(ours / plain for plain, ours in times),
        "worst_ratio": max(ours / plain for plain, ours in times),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=2, help="blocks of the model (default 2)")
    parser.add_argument("--pairs", type=int, default=3, help="interleaved pairs (default 3)")
    parser.add_argument("--json", type=Path, help="write the record here")
    args = parser.parse_args()
    record = stamp(scipy=scipy.__version__, pairs=args.pairs)
    cases = {f"size_{n}": one_matrix(n) for n in (D, D + 1, HIDDEN, HIDDEN + 1)}
    for factors in cases.values():  # compile each size, which the model then finds compiled
        jk.eigendecompose(factors)
    cases[f"model_{args.blocks}_blocks"] = factors_of(args.blocks)
    for name, factors in cases.items():
        record[name] = compare(factors, args.pairs)
        shown(name, record[name])
    write(record, args.json)


if __name__ == "__main__":
    main()
