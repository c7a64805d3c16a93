"""A step of ``jk.kfe_adam`` and of adaptive ``jk.kfac`` beside those of AdamW and SOAP.

Run: OPENBLAS_NUM_THREADS=1 python -m benchmarks.optimizers._step_times [--problem NAME ...]
     [--json benchmarks/results/optimizers/step_times.json]

Ours are ``jk.Optimizer``'s, at its defaults: factors every tenth and every fifth step, sampled
labels. SOAP rotates sides up to 1,024, as kfe_adam does, every tenth step. A time is the mean over
ten steps, refreshes included; the programs take turns, and what counts is the median of the turns.
Run it on an idle machine: CPU seconds of one core.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxkfac as jk
from benchmarks._record import shown, stamp, write
from benchmarks.compile_time import Program, of_problem
from benchmarks.optimizers._soap import soap
from benchmarks.optimizers.problems import PROBLEMS

LARGEST = 1024  # the default of kfe_adam's max_side
PERIOD, TURNS = 10, 7


def programs(program: Program) -> dict[str, Callable[[], None]]:
    """What runs ``PERIOD`` steps of each optimizer, compiled; by name."""
    return {
        "AdamW": _first_order(program, optax.adamw(1e-3)),
        "SOAP": _first_order(program, soap(1e-3, largest=LARGEST)),
        "kfe_adam": _curvature(program, jk.kfe_adam(1e-3)),
        "adaptive": _curvature(program, jk.kfac()),
    }


def _first_order(program: Program, tx: Any) -> Callable[[], None]:
    def step(carry: Any, batch: Any, key: Any) -> Any:
        params, state = carry
        _, grads = jax.value_and_grad(program.plain)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return _repeated(step, (program.params, tx.init(program.params)), program.batch)


def _curvature(program: Program, tx: Any) -> Callable[[], None]:
    opt = jk.Optimizer(program.objective, tx)

    def step(carry: Any, batch: Any, key: Any) -> Any:
        return opt.step(*carry, batch, key)[:2]

    state = opt.init(program.params, program.batch)
    return _repeated(step, (program.params, state), program.batch)


def _repeated(step: Any, carry: Any, batch: Any) -> Callable[[], None]:
    held = [jax.tree.map(jnp.copy, carry)]  # donated: no leaf may be another's buffer
    key = jax.random.key(0)
    compiled = jax.jit(step, donate_argnums=0).lower(held[0], batch, key).compile()

    def run() -> None:
        for _ in range(PERIOD):
            held[0] = jax.block_until_ready(compiled(held[0], batch, key))

    return run


def measured(program: Program) -> dict[str, float]:
    """Milliseconds of a step of each optimizer, and the ratios to AdamW's."""
    runs = programs(program)
    for run in runs.values():
        run()  # the first refresh is another
    spent: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(TURNS):
        for name, run in runs.items():
            begun = time.process_time()
            run()
            spent[name].append((time.process_time() - begun) / PERIOD)
    milliseconds = {name: 1e3 * statistics.median(x) for name, x in spent.items()}
    turns = {name: zip(x, spent["AdamW"], strict=True) for name, x in spent.items()}
    ratios = {
        f"{name} over AdamW": statistics.median(ours / theirs for ours, theirs in pairs)
        for name, pairs in turns.items()
        if name != "AdamW"
    }
    return milliseconds | ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--problem", nargs="+", choices=tuple(PROBLEMS), default=tuple(PROBLEMS))
    parser.add_argument("--core", type=int, help="to run on; by default the last")
    parser.add_argument("--json", type=Path, help="write the record here")
    args = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0)) if args.core is None else args.core})
    record: dict[str, Any] = stamp(period=PERIOD, turns=TURNS, largest=LARGEST, problems={})
    for name in args.problem:
        record["problems"][name] = measured(of_problem(name))
        shown(name, record["problems"][name])
        write(record, args.json)


if __name__ == "__main__":
    main()
