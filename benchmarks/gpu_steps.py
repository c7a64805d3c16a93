"""The steps that ``make accelerators`` compiles, run on a GPU: milliseconds, and bytes at the peak.

Run: python -m benchmarks.gpu_steps [--size real] [--dtype float32] [--minutes 8] [--json FILE]

Each step is compiled and run in a process of its own, which prints the time of compiling first.
Steps that the file has are not made again, and none is begun after ``--minutes``, so that the
record can be made in parts. ``--size small`` runs on a CPU too. ``peak`` is the highest mark of its
allocator, ``planned`` what the compiler said: arguments, temporaries, and outputs that do not take
an argument's place. Scratch that cuSOLVER takes when it runs is in the first alone.
A step of an optimizer donates parameters and state; every tenth decomposes (of `jk.kfac` every
fifth), and its time stands apart.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxkfac as jk
from benchmarks._record import shown, stamp, write
from benchmarks.accelerators._programs import SIZES, Steps
from benchmarks.accelerators._steps import DTYPES, decoder_steps

STEPS = (
    "gradient",
    "factors, empirical",
    "factors, mc",
    "factors, mc, reduce",
    "EKFAC pass",
    "decomposition",
    "natural gradient",
    "K-FAC step",
)
REFRESH_EVERY = 10
OPTIMIZERS: dict[str, Callable[[], Any]] = {  # those of jk.Optimizer
    "AdamW": lambda: optax.adamw(1e-3),
    "Muon": lambda: optax.contrib.muon(1e-3),
    "kfe_adam": lambda: jk.kfe_adam(1e-3),
    "kfac, adaptive": lambda: jk.kfac(),
}
UPDATES = ("K-FAC step", *OPTIMIZERS)  # they change parameters and a state
REPEATS, SECONDS = 20, 3  # of each other step, at most; at least three times


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=sorted(SIZES), default="real")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--minutes", type=float, default=8, help="begin no step after them")
    parser.add_argument("--step", nargs="+", choices=(*STEPS, *OPTIMIZERS), help="default: all")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--measure", metavar="STEP", help=argparse.SUPPRESS)  # what a process does
    arguments = parser.parse_args()
    if jax.default_backend() != "gpu" and arguments.size != "small":
        print("there is no GPU here, so nothing is measured")
        return 0
    if arguments.measure:
        print(json.dumps(measured(arguments.measure, arguments.size, arguments.dtype)))
        return 0
    record = {**stamp(**_versions()), "size": arguments.size, "dtype": arguments.dtype, "steps": {}}
    if arguments.json is not None and arguments.json.exists():
        record = json.loads(arguments.json.read_text())
    stop = time.monotonic() + 60 * arguments.minutes
    words = ["--size", arguments.size, "--dtype", arguments.dtype]
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    for name in arguments.step or (*STEPS, *OPTIMIZERS):
        if name in record["steps"] or time.monotonic() > stop:
            continue
        command = [sys.executable, "-m", "benchmarks.gpu_steps", *words, "--measure", name]
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            print(process.stdout.readline().strip(), flush=True)  # the time of compiling
            said, errors = process.communicate()
        if process.returncode:
            row = {"stopped": errors.strip().rpartition("\n")[2][:200]}
        else:
            row = json.loads(said.strip().rpartition("\n")[2])
        record["steps"][name] = row
        shown(name, row)
        write(record, arguments.json)
    return 0


def measured(name: str, size: str, dtype: str) -> dict[str, Any]:
    """One step, compiled and run on the first device."""
    if name in OPTIMIZERS:
        fn, shapes = Steps(SIZES[size], DTYPES[dtype]).optimizer(OPTIMIZERS[name]())
    else:
        fn, shapes = decoder_steps(size, DTYPES[dtype])[name]()
    updates, begun = name in UPDATES, time.perf_counter()
    step = jax.jit(fn, donate_argnums=(0, 1) if updates else ()).lower(*shapes).compile()
    compile_s = time.perf_counter() - begun
    print(f"{name}: traced and compiled in {compile_s:.1f} s", flush=True)
    args, seconds, out = _filled(name, size, dtype, shapes), [], None
    while len(seconds) < (REFRESH_EVERY + 2 if updates else 3) or (
        sum(seconds[1:]) < SECONDS and len(seconds) <= REPEATS and not updates
    ):
        del out  # else two steps' outputs are alive at once
        start = time.perf_counter()
        out = jax.block_until_ready(step(*args))
        seconds.append(time.perf_counter() - start)
        if updates:
            args = (out[1], out[2], args[2])
    memory, stats = step.memory_analysis(), jax.devices()[0].memory_stats() or {}
    assert all(bool(jnp.isfinite(x).all()) for x in _floats(out)), name
    planned = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    planned += memory.output_size_in_bytes - memory.alias_size_in_bytes
    between = seconds[1:REFRESH_EVERY] if updates else seconds[1:]
    row = {
        "compile_s": compile_s,
        "ms": 1e3 * statistics.median(between),
        "temporaries_mib": memory.temp_size_in_bytes / 2**20,
        "planned_mib": planned / 2**20,
        "peak_mib": stats.get("peak_bytes_in_use", math.nan) / 2**20,
    }
    return row | ({"refresh_ms": 1e3 * seconds[REFRESH_EVERY]} if updates else {})


def _filled(name: str, size: str, dtype: str, shapes: Any) -> Any:
    """Small normal entries, token ids, a key; what is new in a training is zero."""
    rng = np.random.default_rng(0)

    def drawn(x: Any) -> Any:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.key(0)
        if jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.asarray(0.02 * rng.standard_normal(x.shape, np.float32), x.dtype)
        return jnp.asarray(rng.integers(0, 256, x.shape), x.dtype)

    filled = jax.tree.map(drawn, shapes)
    if name not in UPDATES:
        return filled
    params, _, batch = filled
    if name in OPTIMIZERS:
        objective = Steps(SIZES[size], DTYPES[dtype]).objective
        state = jk.Optimizer(objective, OPTIMIZERS[name]()).init(params, batch)
        return params, jax.tree.map(jnp.copy, state), batch
    return params, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes[1]), batch


def _floats(tree: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]


def _versions() -> dict[str, Any]:
    kind = jax.devices()[0].device_kind
    return {"gpu": kind, "python": sys.version.split()[0]}


if __name__ == "__main__":
    sys.exit(main())
