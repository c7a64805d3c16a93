"""Cost of HostCurvature: what it adds to a training step, and what it holds in memory.

Run: python -m benchmarks.host [--steps 40] [--json FILE], with OPENBLAS_NUM_THREADS=1

Time, on the scanned transformer of benchmarks.factors (gradient and factors in one jitted call):

- ``push_ms``: how long the caller is kept by ``push``, with the step's results still on their way.
- ``push_and_average_ms``: a step followed by ``push`` and ``flush``, less the step alone, in
  interleaved pairs: all of the work, with nothing to hide it behind. Its share of the gradient's
  time is what the aim of 5% speaks of.
- ``cpu_over_gradient``: processor time of ``push`` and ``flush``, of factors that are ready, over
  that of the gradient: the same share on a machine that others use as well.
- ``packed_...``: these figures with ``value_grad_and_factors(packed=True)``, whose step folds each
  matrix itself, and whose push is one triangle.
- ``waiting_step_ratio``: steps that are no hand-over, while a decomposition slowed to last
  for the whole run is in work, over steps with none in work, in interleaved blocks.
- ``busy_step_ratio``: the same with the real decomposition going on, which on the CPU shares
  its cores with the step; on an accelerator it does not.

Memory, in a fresh process (resident peak above the start, VmHWM): factors of a few large layers
come in from the host one array at a time, and two refreshes are handed over. Beside it stands the
bound: 2 x folded factors (average and snapshot) + 2 x bases (in use and in work; half of that
second share with stagger 2: the first refresh is of all, but then none are in use) + workers x
4 n^2 + bytes in flight.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxkfac as jk
from benchmarks.factors import cases, seconds
from jaxkfac.blocks import Factors
from jaxkfac.curvature.host import HostCurvature, _decompose
from jaxkfac.interception import Layer, ParameterMatrix

SIZE, LAYERS = 1024, 6


def timed(steps: int) -> dict[str, float]:
    """Every figure of time, in milliseconds or as a ratio of medians."""
    objective, params, batch = cases()["scanned"]
    gradient = jax.jit(jax.value_and_grad(objective))
    stats, packed = (
        jax.jit(jk.value_grad_and_factors(objective, packed=packed)) for packed in (False, True)
    )
    seconds(gradient, params, batch)
    gradient_s = statistics.median(seconds(gradient, params, batch) for _ in range(steps))
    gradient_cpu = statistics.median(
        processor_seconds(gradient, params, batch) for _ in range(steps)
    )
    beside = {"gradient_s": gradient_s, "gradient_cpu": gradient_cpu}
    dense_push, packed_push = (
        push_times(fn, params, batch, steps, **beside) for fn in (stats, packed)
    )
    return {
        "gradient_ms": 1e3 * gradient_s,
        **dense_push,
        **{f"packed_{name}": value for name, value in packed_push.items()},
        **step_ratio("waiting", stats, params, batch, steps),
        **step_ratio("busy", stats, params, batch, steps),
    }


def push_times(
    stats: Any, params: Any, batch: Any, steps: int, *, gradient_s: float, gradient_cpu: float
) -> dict[str, float]:
    """What pushing the factors of a step takes, in interleaved pairs of steps."""
    seconds(stats, params, batch)
    plain, pushed, kept, cpu = [], [], [], []
    step = 0
    with HostCurvature(refresh_every=10**6, lag=5) as service:
        for step in range(steps):
            plain.append(seconds(stats, params, batch))
            start = time.perf_counter()
            out = stats(params, batch)
            before_push = time.perf_counter()
            service.push(out.factors, step)
            kept.append(time.perf_counter() - before_push)
            jax.block_until_ready(out)
            service.flush()
            pushed.append(time.perf_counter() - start)
        for again in range(step + 1, step + 1 + steps):
            start = time.process_time()
            service.push(out.factors, again)
            service.flush()
            cpu.append(time.process_time() - start)
    cost = statistics.median(b - a for a, b in zip(plain, pushed, strict=True))
    return {
        "step_ms": 1e3 * statistics.median(plain),
        "push_ms": 1e3 * statistics.median(kept[1:]),
        "push_and_average_ms": 1e3 * cost,
        "push_and_average_over_gradient": cost / gradient_s,
        "cpu_ms": 1e3 * statistics.median(cpu),
        "cpu_over_gradient": statistics.median(cpu) / gradient_cpu,
    }


def processor_seconds(fn: Any, *args: Any) -> float:
    """Of all threads of this process."""
    start = time.process_time()
    jax.block_until_ready(fn(*args))
    return time.process_time() - start


def step_ratio(how: str, stats: Any, params: Any, batch: Any, steps: int) -> dict[str, float]:
    """Steps while a decomposition is in work over steps while none is, in blocks of five.

    The noise beside it is half the distance of the quartiles of the latter, over their median.
    """
    solve, gate = _decompose.eigh_on_host, threading.Event()
    block = 5

    def wait_then_solve(matrix: np.ndarray, **options: Any) -> Any:
        gate.wait(600)
        return solve(matrix, **options)

    def again(matrix: np.ndarray, **options: Any) -> Any:
        while not gate.is_set():
            solve(matrix, **options)
        return solve(matrix, **options)

    def one(service: HostCurvature, step: int) -> float:
        start = time.perf_counter()
        out = stats(params, batch)
        service.push(out.factors, step)
        service.bases(step)
        jax.block_until_ready(out)
        return time.perf_counter() - start

    free, working, step = [], [], 0
    like = jax.eval_shape(stats, params, batch).factors
    period = 2 * block
    with HostCurvature(
        refresh_every=period, lag=block + 1, initial="identity", like=like
    ) as service:
        for _ in range(max(steps // block, 2)):
            # The first step of a period is its refresh, which is snapshot at the second.
            gate.clear()
            _decompose.eigh_on_host = wait_then_solve if how == "waiting" else again
            for i in range(period):
                if i == block + 1:  # the hand-over: let it end, and do not time this step
                    gate.set()
                taken = one(service, step)
                step += 1
                if 1 < i <= block:
                    working.append(taken)
                elif i > block + 1:
                    free.append(taken)
    _decompose.eigh_on_host = solve
    low, middle, high = statistics.quantiles(free, n=4)
    return {
        f"{how}_step_ratio": statistics.median(working) / middle,
        f"{how}_noise": (high - low) / 2 / middle,
    }


def square_layer(name: str) -> Layer:
    """A layer of SIZE by SIZE without a bias."""
    weight = ParameterMatrix(name, (), (SIZE, SIZE), (), (0,), (1,))
    return Layer(name, "dense", weight, None, SIZE, SIZE, (), 1, name)


def resident(what: str) -> int:
    """``VmRSS`` or ``VmHWM`` of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {what}")


def memory(stagger: int, storage: Any = "float32") -> dict[str, float]:
    """Resident peak of this process above its start, and the bound, in MiB."""
    layers = tuple(square_layer(f"layer_{i}") for i in range(LAYERS))
    rng = np.random.default_rng(0)

    def parts(step: int) -> Any:
        for layer in layers:
            for table in ("a_sums", "g_sums"):
                rows = rng.normal(size=(8, SIZE)).astype(np.float32)
                matrix = rows.T @ rows + np.eye(SIZE, dtype=np.float32) * (step + 1)
                matrix.flags.writeable = False  # so that it is not copied
                tables: dict[str, Any] = {"a_sums": {}, "g_sums": {}, "diagonals": {}}
                tables[table] = {layer.name: matrix}
                counts = {layer.name: np.float32(8)} if table == "a_sums" else {}
                yield Factors(
                    **tables,
                    a_counts=counts,
                    terms=np.float32(8),
                    layers=layers,
                    bias="joint",
                )

    whole = SIZE**2 * 4
    warm = np.eye(SIZE, dtype=np.float32)
    _decompose.eigh_on_host(warm, name="compiles")
    jax.block_until_ready(jax.numpy.asarray(warm))
    del warm
    start = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM back to VmRSS
    with HostCurvature(
        refresh_every=2, lag=1, stagger=stagger, storage=storage, in_flight_bytes=whole
    ) as service:
        for step in range(6):
            for part in parts(step):
                service.push(part, step)
                del part
            service.bases(step)
    peak = resident("VmHWM") - start
    sides = 2 * LAYERS
    folded = sides * SIZE * (SIZE + 1) // 2 * (2 if storage == "bfloat16" else 4)
    bound = 2 * folded + (1 + 1 / stagger) * sides * whole + 4 * whole + whole
    return {"peak_mib": peak / 2**20, "bound_mib": bound / 2**20, "ratio": peak / bound}


def in_fresh_process(*arguments: str) -> dict[str, float]:
    """The record that this module prints when run with ``arguments``."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1048576", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.host", *arguments]
    out = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return json.loads(out.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="steps of each kind (default 40)")
    parser.add_argument("--memory", type=int, metavar="STAGGER", help="only memory, as JSON")
    parser.add_argument("--storage", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--json", type=Path, help="write the record here")
    args = parser.parse_args()
    if args.memory:
        print(json.dumps(memory(args.memory, args.storage)))
        return
    record: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
        "device": str(jax.devices()[0]),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "blas_threads": os.environ.get("OPENBLAS_NUM_THREADS", "unset"),
        "time": timed(args.steps),
        "memory": in_fresh_process("--memory", "1"),
        "memory_stagger_2": in_fresh_process("--memory", "2"),
        "memory_bfloat16": in_fresh_process("--memory", "1", "--storage", "bfloat16"),
    }
    for name, value in record.items():
        if isinstance(value, dict):
            value = {k: round(v, 3) for k, v in value.items()}
        print(f"{name}: {value}")
    if args.json:
        args.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
