"""Cost of factors: (gradient + all factors) / gradient, in time, compile time and bytes.

Run: python -m benchmarks.factors [--pairs 21] [--fisher mc] [--curvlinops] [--json FILE]

Two programs: a dense net (8 layers of 512, 4096 rows) and a scanned, rematted transformer
(4 blocks, d 256, hidden 512, 4 heads, 1024 tokens as 4 sequences of 256). Beside it the same
tokens as one sequence, where attention costs the gradient more ("scanned_long"), and as 8
sequences of 128, where it costs less ("scanned_short"); and hidden 1024, where the factors of
the hidden side dominate ("scanned_wide"). Of the dense net and "scanned_wide" there are the
options that cost less, too: a quarter of the rows ("subsample_0.25"), factors at every fourth step
("every_4": the mean of a step that collects and three that do not, and "between": one of those
alone). The two compiled
programs are timed in interleaved pairs, and the ratio is the median over pairs, because
machines are noisy and their noise is shared by neighbours in time. Bytes come from the
compiled program.

The floor, dense: a gradient is 6 n d^2 operations a layer (forward 2, backward 4); A and G
are 2 n d^2 each, or half of that where only one triangle is computed. So full products cost
1.67 x the gradient and triangles 1.33 x, before anything else.

With --curvlinops the dense net is taken there, too: PyTorch's gradient, and their pass for all
factors, whose ratio to it is taken in the same way.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

import jaxkfac as jk
from benchmarks._record import shown, stamp, write
from jaxkfac.interception import trace
from jaxkfac.interception.values import Slot


class DenseNet(nn.Module):
    """Eight layers of 512."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(7):
            x = jnp.tanh(nn.Dense(512)(x))
        return nn.Dense(512)(x)


class Block(nn.Module):
    """A pre-norm transformer block."""

    hidden: int

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        d = x.shape[-1]
        x = x + nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x))
        return x + nn.Dense(d)(nn.gelu(nn.Dense(self.hidden)(nn.LayerNorm()(x)))), None


class ScannedTransformer(nn.Module):
    """Four blocks, scanned and rematted, with an embedding and a head."""

    hidden: int

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        x = nn.Embed(256, 256)(ids)
        stack = nn.scan(
            nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=4
        )
        x, _ = stack(self.hidden)(x, None)
        return nn.Dense(256)(nn.LayerNorm()(x))


def cases() -> dict[str, tuple[Any, Any, Any]]:
    """``{name: (objective, params, batch)}``."""
    keys = jax.random.split(jax.random.key(0), 6)
    x, y = jax.random.normal(keys[0], (4096, 512)), jax.random.randint(keys[1], (4096,), 0, 512)
    ids = jax.random.randint(keys[2], (4, 256), 0, 256)
    long, short = ids.reshape(1, 1024), ids.reshape(8, 128)
    out = {}
    for name, model, inputs, targets in (
        ("dense", DenseNet(), x, y),
        ("scanned", ScannedTransformer(512), ids, jnp.roll(ids, -1, 1)),
        ("scanned_long", ScannedTransformer(512), long, jnp.roll(long, -1, 1)),
        ("scanned_short", ScannedTransformer(512), short, jnp.roll(short, -1, 1)),
        ("scanned_wide", ScannedTransformer(1024), ids, jnp.roll(ids, -1, 1)),
    ):
        objective = jk.Objective(model.apply, jk.Categorical())
        out[name] = (objective, model.init(keys[3], inputs), (inputs, targets))
    return out


def compiled(fn: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    """The compiled function and the seconds it took to trace and compile."""
    start = time.perf_counter()
    out = jax.jit(fn).lower(*args).compile()
    return out, time.perf_counter() - start


def compilation(plain: Any, full: Any, args: Any, pairs: int = 5) -> dict[str, float]:
    """Tracing and compiling ``full`` over ``plain``, in wall and in CPU seconds of all threads."""

    def spent(fn: Any) -> tuple[float, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        jax.jit(lambda *args: fn(*args)).lower(*args).compile()
        return time.perf_counter() - wall, time.process_time() - cpu

    spent(plain)  # the first of a process is slower than any later
    ratios = []
    for _ in range(pairs):
        jax.clear_caches()
        (wall, cpu), (full_wall, full_cpu) = spent(plain), spent(full)
        ratios.append((full_wall / wall, full_cpu / cpu))
    walls, cpus = zip(*ratios, strict=True)
    return {
        "compile_ratio": statistics.median(walls),
        "compile_cpu_ratio": statistics.median(cpus),
    }


def seconds(fn: Callable[..., Any], *args: Any) -> float:
    start = time.perf_counter()
    jax.block_until_ready(fn(*args))
    return time.perf_counter() - start


def traced_seconds(fn: Callable[..., Any], *args: Any) -> float:
    """Best of five tracings, without compiling."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        jax.make_jaxpr(lambda *a: fn(*a))(*args)
        times.append(time.perf_counter() - start)
    return min(times)


def cheaper(objective: Any, params: Any, batch: Any, pairs: int, fisher: str) -> dict[str, float]:
    """Ratios of the options that cost less, each against the gradient in interleaved pairs."""
    gradient, _ = compiled(jax.value_and_grad(objective), params, batch)
    key = jax.random.key(0)

    def of(**options: Any) -> Any:
        stats = jk.value_grad_and_factors(objective, fisher=fisher, **options)
        return compiled(lambda p, b, k, s: stats(p, b, k, step=s), params, batch, key, 0)[0]

    part, sometimes = of(subsample=0.25), of(every=4)
    runs = {
        "subsample_0.25": lambda: seconds(part, params, batch, key, 0),
        "collecting": lambda: seconds(sometimes, params, batch, key, 0),
        "between": lambda: seconds(sometimes, params, batch, key, 1),
    }
    out = {}
    for name, run in runs.items():
        seconds(gradient, params, batch), run()
        times = [(seconds(gradient, params, batch), run()) for _ in range(pairs)]
        out[name] = statistics.median(b / a for a, b in times)
    return out | {"every_4": (out.pop("collecting") + 3 * out["between"]) / 4}


def measure(objective: Any, params: Any, batch: Any, pairs: int, fisher: str) -> dict[str, float]:
    """All figures of one program; ``temp_over_bound`` is against 1.1 x gradient + factors."""
    gradient = jax.value_and_grad(objective)

    def both(params: Any, batch: Any) -> Any:
        stats = jk.value_grad_and_factors(objective, fisher=fisher)
        return stats(params, batch, jax.random.key(0))

    def again(params: Any, batch: Any) -> Any:
        """The gradient of the program run again with a handler that changes nothing."""
        inputs, targets = batch
        traced = trace(lambda p, x: objective.apply_fn(p, x), params, inputs)  # not cached
        slots = {name: Slot() for name in traced.table}

        def loss(params: Any) -> Any:
            outputs = traced.run(lambda site, xs: site.bind(*xs), params, slots, inputs)
            return objective.loss(outputs, targets, None)[0]

        return jax.value_and_grad(loss)(params)

    compiling = compilation(gradient, both, (params, batch))
    plain, _ = compiled(gradient, params, batch)
    full, _ = compiled(both, params, batch)
    factors = jax.eval_shape(both, params, batch).factors
    factor_bytes = sum(f.size * f.dtype.itemsize for f in jax.tree.leaves(factors))
    seconds(plain, params, batch), seconds(full, params, batch)
    times = [(seconds(plain, params, batch), seconds(full, params, batch)) for _ in range(pairs)]
    tracing = traced_seconds(gradient, params, batch)
    before, after = plain.memory_analysis(), full.memory_analysis()
    return {
        "gradient_ms": 1e3 * statistics.median(t for t, _ in times),
        "time_ratio": statistics.median(b / a for a, b in times),
        "interpretation_trace_ratio": traced_seconds(again, params, batch) / tracing,
        "factors_trace_ratio": traced_seconds(both, params, batch) / tracing,
        **compiling,
        "gradient_temp_mib": before.temp_size_in_bytes / 2**20,
        "temp_mib": after.temp_size_in_bytes / 2**20,
        "factors_mib": factor_bytes / 2**20,
        "temp_over_bound": after.temp_size_in_bytes
        / (1.1 * before.temp_size_in_bytes + factor_bytes),
    }


def beside_curvlinops(pairs: int, fisher: str) -> dict[str, Any]:
    """Their figures, of a process of its own."""
    command = [sys.executable, "-m", "benchmarks._curvlinops_factors", str(pairs), fisher]
    return json.loads(subprocess.check_output(command, text=True).splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=21, help="interleaved pairs (default 21)")
    parser.add_argument("--fisher", default="empirical", choices=("empirical", "mc"))
    parser.add_argument("--curvlinops", action="store_true", help="the dense net there, too")
    parser.add_argument("--json", type=Path, help="write the record here")
    args = parser.parse_args()
    record = stamp(fisher=args.fisher, pairs=args.pairs)
    for name, case in cases().items():
        record[name] = measure(*case, args.pairs, args.fisher)
        if name in ("dense", "scanned_wide"):
            record[name] |= cheaper(*case, args.pairs, args.fisher)
        shown(name, record[name])
    if args.curvlinops:
        record["curvlinops"] = beside_curvlinops(args.pairs, args.fisher)
        shown("curvlinops", record["curvlinops"])
    write(record, args.json)


if __name__ == "__main__":
    main()
