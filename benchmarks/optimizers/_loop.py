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
    steps: int = 0,
) -> dict[str, list[float | None]]:
    """Train for ``budget`` CPU seconds and ``steps`` steps, whichever is longer.

    Training stops early where the validation measure is not finite. ``progress`` is the smaller one
    of the two shares that have passed; a length of zero does not count.

    Args:
        step: ``step(carry, batch, number, progress) -> (carry, loss)``, compiled before.
        carry: A tuple that begins with the parameters.
        problem: What is trained.
        data: Its data.
        seed: Of the order of the examples.
        budget: CPU seconds of all threads, without evaluations.
        steps: As above; the measure is evaluated after exactly as many.

    Returns:
        At each evaluation (one comes after the first step) the steps taken, CPU and wall seconds,
        the loss of the last batch and the validation measure; ``None`` stands for what is not
        finite.
    """
    validate = jax.jit(problem.validate)
    held = jax.tree.map(jnp.asarray, data)
    due = iter((np.arange(1, POINTS + 1) / POINTS) ** 2)
    first, finite = float(validate(carry[0], held)), True
    curve: dict[str, list[float | None]] = {
        "steps": [0], "cpu_s": [0.0], "wall_s": [0.0], "loss": [None], "validation": [first]
    }  # fmt: skip
    taken, cpu, wall, progress, following = 0, 0.0, 0.0, 0.0, next(due)
    while progress < 1 and finite:
        before = time.process_time(), time.perf_counter()
        batch = problem.batch(data, seed, taken)
        carry, loss = jax.block_until_ready(step(carry, batch, taken, progress))
        cpu += time.process_time() - before[0]
        wall += time.perf_counter() - before[1]
        taken += 1
        progress = min(x / whole for x, whole in ((cpu, budget), (taken, steps)) if whole)
        if progress >= following or taken in (1, steps):
            found = [float(loss), float(validate(carry[0], held))]
            finite = bool(np.isfinite(found[1]))
            numbers = [taken, cpu, wall, *(x if np.isfinite(x) else None for x in found)]
            for name, number in zip(curve, numbers, strict=True):
                curve[name].append(number)
            following = next((x for x in due if x > progress), 1.0)
    return curve
