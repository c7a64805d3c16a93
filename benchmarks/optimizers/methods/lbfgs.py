"""L-BFGS of optax, with its own line search, where every step sees the same batch."""

from typing import Any

import jax
import optax

from benchmarks.optimizers._method import Method, Setting, Steps, here
from benchmarks.optimizers._problem import Arrays, Problem, unmarked


def _build(problem: Problem, data: Arrays, setting: Setting) -> Steps:
    tx = optax.lbfgs(memory_size=setting["memory_size"])

    def step(carry: Any, batch: Any, key: Any, progress: Any) -> Any:
        params, state = carry

        def loss(params: Any) -> Any:
            return problem.loss(params, batch, unmarked)

        value, grads = optax.value_and_grad_from_state(loss)(params, state=state)
        updates, state = tx.update(grads, state, params, value=value, grad=grads, value_fn=loss)
        return (optax.apply_updates(params, updates), state), value

    return Steps(lambda params: (params, tx.init(params)), jax.jit(step))


SETTINGS = tuple({"memory_size": size} for size in (10, 30, 100, 300))

LBFGS = Method(
    name="lbfgs",
    title="L-BFGS",
    settings=SETTINGS,
    run=here(_build),
    only=frozenset({"poisson", "burgers"}),
    documented=SETTINGS[:1],  # the default of optax
    choices=SETTINGS,
)
