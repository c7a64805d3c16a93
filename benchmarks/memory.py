"""Planned bytes against measured ones, row by row, each measured in a fresh process.

Run: python -m benchmarks.memory [--json FILE]

The program is a scanned, rematted transformer (6 blocks, d 512, hidden 1024, 8 x 128 tokens) with
Adam and K-FAC's factors and bases. ``jk.plan_memory`` sees its shapes alone. Each row is then
measured in a process of its own: resident memory after a stage less before it, the arrays of
earlier stages alive; for ``activations`` the highest mark during the gradient, less the
gradient that stays. On a GPU the allocator's own counts take the place of resident memory.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import jaxkfac as jk
from benchmarks._record import shown, stamp, write

ROWS = ("parameters", "gradients", "optimizer", "activations", "factors", "bases")
MIB = 2**20


class Block(nn.Module):
    """A pre-norm transformer block."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        d = x.shape[-1]
        x = x + nn.MultiHeadDotProductAttention(8)(nn.LayerNorm()(x))
        return x + nn.Dense(d)(nn.gelu(nn.Dense(2 * d)(nn.LayerNorm()(x)))), None


class Transformer(nn.Module):
    """Six blocks, scanned and rematted, with an embedding and a head."""

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        x = nn.Embed(512, 512)(ids)
        stack = nn.scan(
            nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=6
        )
        x, _ = stack()(x, None)
        return nn.Dense(512)(nn.LayerNorm()(x))


def problem() -> tuple[Any, Any, Any]:
    """Objective, a function that makes the parameters, and the batch."""
    ids = jax.random.randint(jax.random.key(0), (8, 128), 0, 512)
    model = Transformer()
    init = jax.jit(lambda key: model.init(key, ids))
    return jk.Objective(model.apply, jk.Categorical()), init, (ids, jnp.roll(ids, -1, 1))


def planned() -> dict[str, int]:
    """Bytes of every row, from shapes."""
    objective, init, batch = problem()
    params = jax.eval_shape(init, jax.random.key(1))
    plan = jk.plan_memory(
        objective, params, batch, optimizer=optax.adam(1e-3), device_bytes=1e12, options=()
    )
    return {row: plan.now.device[row] for row in ROWS}


def measured(row: str) -> int:
    """Bytes of one row, in this process."""
    objective, init, batch = problem()
    tx = optax.adam(1e-3)
    key = jax.random.key(1)
    shapes = jax.eval_shape(init, key)
    gradient = jax.jit(jax.grad(objective)).lower(shapes, batch).compile()
    stats = jax.jit(jk.value_grad_and_factors(objective))
    made = init.lower(key).compile()
    start = jax.jit(tx.init).lower(shapes).compile()
    collect = stats.lower(shapes, batch).compile()
    if row == "parameters":
        return _kept(lambda: made(key))
    params = jax.block_until_ready(made(key))
    if row == "gradients":
        return _kept(lambda: gradient(params, batch))
    if row == "activations":
        return _peak(lambda: gradient(params, batch))
    if row == "optimizer":
        return _kept(lambda: start(params))
    if row == "factors":
        return _kept(lambda: collect(params, batch).factors)
    factors = jax.block_until_ready(collect(params, batch).factors)
    return _kept(lambda: jk.eigendecompose(factors))


def _in_use() -> int:
    """Bytes in use now: the allocator's on a GPU, resident memory elsewhere."""
    stats = jax.devices()[0].memory_stats()
    if stats:
        return stats["bytes_in_use"]
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _kept(make: Any) -> int:
    """Bytes that stay with a result. A first run, not counted, starts threads and scratch."""
    jax.block_until_ready(make())
    gc.collect()
    before = _in_use()
    result = jax.block_until_ready(make())
    gc.collect()
    after = _in_use()
    del result
    return after - before


def _peak(run: Any) -> int:
    """Bytes at the highest mark of a run beside its result."""
    result_bytes = sum(x.nbytes for x in jax.tree.leaves(jax.block_until_ready(run())))
    gc.collect()
    before = _in_use()
    with jk.memory.track("run") as stage:
        jax.block_until_ready(run())
    if stage.device_peaks:
        peak = next(iter(stage.device_peaks.values())).nbytes
    else:
        assert stage.resident_peak is not None, "this system does not count resident memory"
        peak = stage.resident_peak.nbytes
    return peak - before - result_bytes


def in_fresh_process(row: str) -> int:
    """What ``measured`` returns in a process of its own."""
    environment = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": "1048576",  # freed arrays go back to the system at once
        "OPENBLAS_NUM_THREADS": "1",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    command = [sys.executable, "-m", "benchmarks.memory", "--measure", row]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--measure", choices=ROWS, help="only this row, in this process")
    args = parser.parse_args()
    if args.measure:
        print(measured(args.measure))
        return
    record = stamp()
    for row, plan in planned().items():
        found = in_fresh_process(row)
        record[row] = {
            "planned_mib": plan / MIB,
            "measured_mib": found / MIB,
            "planned_over_measured": plan / found,
        }
        shown(row, record[row])
    write(record, args.json)


if __name__ == "__main__":
    main()
