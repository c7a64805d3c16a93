"""Schedule-free AdamW of optax; what is evaluated is the average that it keeps."""

from typing import Any

import jax
import optax

from benchmarks.optimizers._method import Method, Setting, Steps, here
from benchmarks.optimizers._problem import Arrays, Problem, unmarked


def _build(problem: Problem, data: Arrays, setting: Setting) -> Steps:
    tx = optax.contrib.schedule_free_adamw(**setting)

    def step(carry: Any, batch: Any, key: Any, progress: Any) -> Any:
        _, params, state = carry
        value, grads = jax.value_and_grad(problem.loss)(params, batch, unmarked)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        average = optax.contrib.schedule_free_eval_params(state, params)
        return (average, params, state), value

    return Steps(lambda params: (params, params, tx.init(params)), step)


SCHEDULE_FREE = Method(
    name="schedule_free",
    title="schedule-free AdamW",
    settings=(),
    run=here(_build, traced=("learning_rate",)),
    documented=({"learning_rate": 2.5e-3},),  # the default of optax
    choices=tuple({"learning_rate": rate} for rate in (3e-3, 1e-2, 3e-2, 1e-1, 3e-1)),
)
