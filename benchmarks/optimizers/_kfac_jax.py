"""Runs of kfac-jax, in an environment with it: no import of ours.

Run: python -m benchmarks.optimizers._kfac_jax PROBLEM DATA.npz SETTING

It reads a seed, CPU seconds and perhaps steps a line, and answers with a run.
"""

import json
import os
import sys
import time
from typing import Any

# The products of jaxlib 0.8.1 on the CPU pack a matrix once and know it again by its address. A
# donated parameter is written in place: the next step reads the old one, and training diverges.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_use_xnnpack=false"

import jax
import jax.numpy as jnp
import kfac_jax  # pyright: ignore[reportMissingImports]
import numpy as np

from benchmarks.optimizers._loop import anneal, train
from benchmarks.optimizers.problems import PROBLEMS

_REGISTER = {
    "bernoulli": kfac_jax.register_multi_bernoulli_predictive_distribution,
    "categorical": kfac_jax.register_categorical_predictive_distribution,
    "gaussian": lambda x, targets, weight: kfac_jax.register_normal_predictive_distribution(
        x, targets, variance=1.0, weight=weight
    ),
}


def registered(kind: str, outputs: Any, targets: Any, weight: float = 1.0) -> Any:
    """By kfac-jax's own tags; terms are rows of a matrix there."""
    rows = outputs.reshape(-1, outputs.shape[-1] if outputs.ndim > 1 else 1)
    targets = targets.reshape(-1) if kind == "categorical" else targets.reshape(rows.shape)
    _REGISTER[kind](rows, targets=targets, weight=weight)
    return outputs


def main() -> None:
    name, file, setting = sys.argv[1:]
    problem, data, begun = PROBLEMS[name], dict(np.load(file)), time.process_time()
    numbers = json.loads(setting)
    period = numbers["period"]
    adaptive = "initial_damping" in numbers
    optimizer = kfac_jax.Optimizer(
        jax.value_and_grad(lambda params, batch: problem.loss(params, batch, registered)),
        l2_reg=0.0,
        use_adaptive_learning_rate=adaptive,
        use_adaptive_momentum=adaptive,
        use_adaptive_damping=adaptive,
        initial_damping=numbers["initial_damping"] if adaptive else None,
        norm_constraint=numbers.get("norm_constraint"),
        inverse_update_period=period,
        curvature_update_period=max(1, period // 5),
        num_burnin_steps=0,
        estimation_mode={"mc": "fisher_gradients", "exact": "fisher_exact"}[problem.fisher],
        multi_device=False,
    )

    def step(carry: Any, batch: Any, key: Any, number: int, progress: float) -> Any:
        given: dict[str, Any] = {}
        if not adaptive:
            rate = numbers["learning_rate"] * float(anneal(progress))
            given = {"learning_rate": rate, "momentum": 0.9, "damping": numbers["damping"]}
            given = {name: jnp.float32(x) for name, x in given.items()}
        batch = jax.tree.map(jnp.asarray, batch)
        params, state, stats = optimizer.step(
            *carry, jax.random.fold_in(key, number), batch=batch, global_step_int=number, **given
        )
        return (params, state), stats["loss"]

    def start(seed: int) -> Any:
        params = jax.tree.map(jnp.asarray, problem.initial(seed))
        batch = jax.tree.map(jnp.asarray, problem.batch(data, seed, 0))
        return params, optimizer.init(params, jax.random.key(0), batch)

    carry, key = start(0), jax.random.key(0)
    for number in range(period + 2):  # every program of a run, on steps that are thrown away
        carry, _ = step(carry, problem.batch(data, 0, number), key, number, 0.0)
    jax.block_until_ready(carry)
    spent = time.process_time() - begun
    versions = {"jax": jax.__version__, "kfac_jax": kfac_jax.__version__}
    for line in sys.stdin:
        words, before = line.split(), time.process_time()
        seed, budget, steps = int(words[0]), float(words[1]), sum(map(int, words[2:]))
        key = jax.random.key(seed)

        def timed(carry: Any, batch: Any, number: int, progress: float, key: Any = key) -> Any:
            return step(carry, batch, key, number, progress)

        curve = train(timed, start(seed), problem, data, seed=seed, budget=budget, steps=steps)
        used = {"compile_cpu_s": spent, "run_cpu_s": time.process_time() - before}
        about = {"versions": versions, "xla_flags": os.environ["XLA_FLAGS"].strip()}
        print(json.dumps({**about, **used, **curve}), flush=True)


if __name__ == "__main__":
    main()
