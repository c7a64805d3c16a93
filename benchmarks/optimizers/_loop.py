"""Training on a clock that stops for evaluations. It is read in the peers' environments too."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.optimizers._problem import Arrays, Problem

POINTS = 48  # evaluations of a run; they are closer together at its beginning


def anneal(progress: Any) -> Any:
    """What a given learning rate is multiplied by: 1, and from half the budget on down to 0."""
    return jnp.minimum(1.0, 2 * (1 - progress))


def train(
    step: Callable[[Any, Any, int, float], tuple[Any, Any]],
    carry: Any,
    problem: Problem,
    data: Arrays,
    *,
    seed: int,
    budget: float,
) -> dict[str, list[float | None]]:
    """Steps until they have taken ``budget`` CPU seconds, or the parameters are not finite.

    Args:
        step: ``step(carry, batch, number, progress) -> (carry, loss)``, compiled before.
        carry: A tuple that begins with the parameters.
        problem: What is trained.
        data: Its data.
        seed: Of the order of the examples.
        budget: CPU seconds of all threads, without evaluations.

    Returns:
        At each evaluation the steps taken, CPU and wall seconds, the loss of the last batch and
        the validation measure; ``None`` stands for what is not finite.
    """
    validate = jax.jit(problem.validate)
    held = jax.tree.map(jnp.asarray, data)
    due = iter(budget * (np.arange(1, POINTS + 1) / POINTS) ** 2)
    first, finite = float(validate(carry[0], held)), True
    curve: dict[str, list[float | None]] = {
        "steps": [0], "cpu_s": [0.0], "wall_s": [0.0], "loss": [None], "validation": [first]
    }  # fmt: skip
    taken, cpu, wall, following = 0, 0.0, 0.0, next(due)
    while cpu < budget and finite:
        before = time.process_time(), time.perf_counter()
        batch = problem.batch(data, seed, taken)
        carry, loss = jax.block_until_ready(step(carry, batch, taken, min(1.0, cpu / budget)))
        cpu += time.process_time() - before[0]
        wall += time.perf_counter() - before[1]
        taken += 1
        if cpu >= following:
            found = [float(loss), float(validate(carry[0], held))]
            finite = bool(np.isfinite(found[1]))
            numbers = [taken, cpu, wall, *(x if np.isfinite(x) else None for x in found)]
            for name, number in zip(curve, numbers, strict=True):
                curve[name].append(number)
            following = next((x for x in due if x > cpu), budget)
    return curve
