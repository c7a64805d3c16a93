"""A step of `jk.kfe_adam` beside SOAP's and beside the gradient, with and without factors.

Run: python -m benchmarks.optimizers._step_times [--problem NAME ...]
     [--json benchmarks/results/optimizers/step_times.json]

SOAP rotates the sides that kfe_adam rotates, those up to 1,024. Both refresh every ten steps, and
a time is the mean over ten steps, refresh included; the programs take turns, and what counts is the
median of the turns. Run it on an idle machine: CPU seconds of one core.
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
from benchmarks.optimizers._kfac import statistics as statistics_of
from benchmarks.optimizers._problem import Problem, unmarked
from benchmarks.optimizers._soap import soap
from benchmarks.optimizers.problems import PROBLEMS

LARGEST = 1024  # the default of kfe_adam's max_side
PERIOD, TURNS = 10, 7


def programs(problem: Problem) -> dict[str, Callable[[], None]]:
    """What runs ``PERIOD`` steps of each program, compiled; by name."""
    data = problem.data()
    params = jax.tree.map(jnp.asarray, problem.initial(0))
    batch = jax.tree.map(jnp.asarray, problem.batch(data, 0, 0))
    _, stats, like = statistics_of(problem, data, fisher="empirical")
    gradient = lambda params, batch: jax.value_and_grad(problem.loss)(params, batch, unmarked)

    def of_soap(carry: Any, batch: Any) -> Any:
        params, state = carry
        _, grads = gradient(params, batch)
        updates, state = peer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def of_kfe_adam(carry: Any, batch: Any) -> Any:
        params, state = carry
        _, grads, factors = stats(params, batch)
        updates, state = tx.update(grads, state, params, factors=factors)
        return optax.apply_updates(params, updates), state

    peer, tx = soap(1e-3, largest=LARGEST), jk.kfe_adam(1e-3, like=like, refresh_every=PERIOD)
    return {
        "gradient": _repeated(lambda carry, batch: (carry, gradient(carry, batch)), params, batch),
        "with factors": _repeated(lambda carry, batch: (carry, stats(carry, batch)), params, batch),
        "SOAP": _trained(of_soap, (params, peer.init(params)), batch),
        "kfe_adam": _trained(of_kfe_adam, (params, tx.init(params)), batch),
    }


def _repeated(call: Any, params: Any, batch: Any) -> Callable[[], None]:
    compiled = jax.jit(lambda params, batch: call(params, batch)[1]).lower(params, batch).compile()

    def run() -> None:
        for _ in range(PERIOD):
            jax.block_until_ready(compiled(params, batch))

    return run


def _trained(step: Any, carry: Any, batch: Any) -> Callable[[], None]:
    held = [jax.tree.map(jnp.copy, carry)]  # donated: no leaf may be another's buffer
    compiled = jax.jit(step, donate_argnums=0).lower(held[0], batch).compile()

    def run() -> None:
        for _ in range(PERIOD):
            held[0] = jax.block_until_ready(compiled(held[0], batch))

    return run


def measured(problem: Problem) -> dict[str, float]:
    """Milliseconds of a step, and its two ratios."""
    runs = programs(problem)
    for run in runs.values():
        run()  # the first refresh is another
    spent: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(TURNS):
        for name, run in runs.items():
            begun = time.process_time()
            run()
            spent[name].append((time.process_time() - begun) / PERIOD)
    ratios = {"over_soap": [], "over_factors_and_soap": []}
    for gradient, factors, peer, ours in zip(*spent.values(), strict=True):
        ratios["over_soap"].append(ours / peer)
        ratios["over_factors_and_soap"].append(ours / (factors + peer - gradient))
    milliseconds = {name: 1e3 * statistics.median(x) for name, x in spent.items()}
    return milliseconds | {name: statistics.median(x) for name, x in ratios.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--problem", nargs="+", choices=tuple(PROBLEMS), default=tuple(PROBLEMS))
    parser.add_argument("--json", type=Path, help="write the record here")
    args = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    record: dict[str, Any] = stamp(period=PERIOD, turns=TURNS, largest=LARGEST, problems={})
    for name in args.problem:
        record["problems"][name] = measured(PROBLEMS[name])
        shown(name, record["problems"][name])
        write(record, args.json)


if __name__ == "__main__":
    main()
