"""What is compared: optimizers that run here, each a step to be compiled."""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from benchmarks.optimizers._loop import anneal, train
from benchmarks.optimizers._problem import Arrays, Problem, unmarked

Setting = Mapping[str, Any]


class Method(NamedTuple):
    """An optimizer, and the few settings that are tried.

    Attributes:
        name: On the command line and in the record.
        title: On the page.
        settings: Those of the grid.
        run: ``run(problem, data, setting, seed=, budget=)``, a curve with ``compile_cpu_s``.
        only: Names of the problems it is for; ``None`` is all of them.
    """

    name: str
    title: str
    settings: tuple[Setting, ...]
    run: Callable[..., dict[str, Any]]
    only: frozenset[str] | None = None


class Steps(NamedTuple):
    """``init(params)``, a carry that begins with them; ``step(carry, batch, key, progress)``."""

    init: Callable[[Any], Any]
    step: Callable[[Any, Any, Any, Any], tuple[Any, Any]]


def here(build: Callable[[Problem, Arrays, Setting], Steps]) -> Callable[..., dict[str, Any]]:
    """Runs of an optimizer in this process; what compiling costs is told apart."""

    def run(
        problem: Problem, data: Arrays, setting: Setting, *, seed: int, budget: float
    ) -> dict[str, Any]:
        begun = time.process_time()
        steps = build(problem, data, setting)
        carry = steps.init(jax.tree.map(jnp.asarray, problem.initial(seed)))
        carry = jax.tree.map(jnp.copy, carry)  # each leaf is donated: none may be another's buffer

        def step(carry: Any, batch: Any, number: Any, progress: Any) -> Any:
            return steps.step(
                carry, batch, jax.random.fold_in(jax.random.key(seed), number), progress
            )

        first = carry, problem.batch(data, seed, 0), jnp.int32(0), jnp.float32(0)
        compiled = jax.jit(step, donate_argnums=0).lower(*first).compile()
        spent = time.process_time() - begun

        def timed(carry: Any, batch: Any, number: int, progress: float) -> Any:
            return compiled(carry, batch, jnp.int32(number), jnp.float32(progress))

        curve = train(timed, carry, problem, data, seed=seed, budget=budget)
        jax.clear_caches()
        return {"compile_cpu_s": spent, **curve}

    return run


def first_order(
    make: Callable[[Setting], optax.GradientTransformation],
) -> Callable[..., dict[str, Any]]:
    """Runs of an optax transformation of gradients, annealed at the end."""

    def build(problem: Problem, data: Arrays, setting: Setting) -> Steps:
        tx = make(setting)

        def step(carry: Any, batch: Any, key: Any, progress: Any) -> Any:
            params, state = carry
            value, grads = jax.value_and_grad(problem.loss)(params, batch, unmarked)
            updates, state = tx.update(grads, state, params)
            updates = optax.tree.scale(anneal(progress), updates)
            return (optax.apply_updates(params, updates), state), value

        return Steps(lambda params: (params, tx.init(params)), step)

    return here(build)
