"""Which run comes next, and making it."""

import datetime
import importlib.metadata
import json
import os
import resource
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.optimizers._method import Method
from benchmarks.optimizers._problem import Arrays, Problem
from benchmarks.optimizers._record import (
    SEEDS,
    Key,
    Record,
    chosen,
    fails_alike,
    grid_keys,
    of_grid,
)

VERSIONS = ("jax", "optax", "numpy")


def missing(record: Record, methods: Sequence[Method], problem: Problem) -> Key | None:
    """The next run at equal time that is not there: grids first, then each seed of every method.

    A method of whose grid nothing came to its end has no seeds; one that fails twice in the same
    way is not tried again.
    """
    ours = [m for m in methods if m.is_for(problem) and m.settings and problem.budget]
    ours = [m for m in ours if not fails_alike(of_grid(record.lines, m, problem))]
    keys = [key for method in ours for key in grid_keys(method, problem)]
    settings = {method.name: chosen(record.lines, method, problem) for method in ours}
    keys += [
        Key(method.name, json.dumps(settings[method.name]), seed, problem.budget)
        for seed in SEEDS
        for method in ours
        if settings[method.name] is not None
    ]
    return next((key for key in keys if key not in record), None)


def run_of(problem: Problem, method: Method, data: Arrays, key: Key) -> dict[str, Any]:
    """A line of the record; a run that fails is one with its error."""
    begun, cpu, load = time.perf_counter(), _cpu(), os.getloadavg()[0]
    setting, error, curve = json.loads(key.setting), None, {}
    length: dict[str, Any] = {"budget": key.budget} | ({"steps": key.steps} if key.steps else {})
    try:
        curve = method.run(problem, data, setting, seed=key.seed, **length)
    except (ImportError, OSError):  # of the environment, not of the method
        raise
    except Exception as failed:  # a row of the table
        words = str(failed).strip().splitlines() or [""]
        error = f"{type(failed).__name__}: {words[0]}"[:400]
    return {
        "date": datetime.date.today().isoformat(),
        "method": method.name,
        "setting": setting,
        "seed": key.seed,
        "budget": key.budget,
        "least_steps": key.steps,
        "error": error,
        "load_before": round(load, 2),
        "run_cpu_s": round(_cpu() - cpu, 3),  # of a peer's run the peer tells, behind
        "run_wall_s": round(time.perf_counter() - begun, 3),
        "command": f"python -m benchmarks.optimizers --problem {problem.name}"
        + " --equal-steps" * bool(key.steps),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "versions": {name: importlib.metadata.version(name) for name in VERSIONS},
        **curve,
    }


def _cpu() -> float:
    """CPU seconds of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
