"""What is compared: optimizers that run here, each a step to be compiled."""

import json
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


class _Compiled(NamedTuple):
    """``Steps``, compiled: ``step(carry, batch, seed, number, progress)``, and CPU seconds."""

    init: Callable[[Any], Any]
    step: Callable[..., tuple[Any, Any]]
    cpu_s: float


def here(build: Callable[[Problem, Arrays, Setting], Steps]) -> Callable[..., dict[str, Any]]:
    """Runs of an optimizer in this process; what compiling costs is told apart.

    The program of the last setting is kept: the seeds of the one that is chosen share it.
    """
    kept: dict[tuple[Problem, str], _Compiled] = {}

    def run(
        problem: Problem, data: Arrays, setting: Setting, *, seed: int, budget: float
    ) -> dict[str, Any]:
        key = problem, json.dumps(dict(setting))
        if key not in kept:
            kept.clear()
            jax.clear_caches()
            kept[key] = _compiled(build, problem, data, setting)
        init, compiled, spent = kept[key]

        def timed(carry: Any, batch: Any, number: int, progress: float) -> Any:
            return compiled(carry, batch, jnp.int32(seed), jnp.int32(number), jnp.float32(progress))

        curve = train(timed, init(problem.initial(seed)), problem, data, seed=seed, budget=budget)
        return {"compile_cpu_s": spent, **curve}

    return run


def _compiled(
    build: Callable[[Problem, Arrays, Setting], Steps],
    problem: Problem,
    data: Arrays,
    setting: Setting,
) -> _Compiled:
    begun = time.process_time()
    steps = build(problem, data, setting)

    def init(params: Any) -> Any:
        carry = steps.init(jax.tree.map(jnp.asarray, params))
        return jax.tree.map(jnp.copy, carry)  # leaves are donated: none may be another's buffer

    def step(carry: Any, batch: Any, seed: Any, number: Any, progress: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(seed), number)
        return steps.step(carry, batch, key, progress)

    zero = jnp.int32(0)
    first = init(problem.initial(0)), problem.batch(data, 0, 0), zero, zero, jnp.float32(0)
    compiled = jax.jit(step, donate_argnums=0).lower(*first).compile()
    return _Compiled(init, compiled, time.process_time() - begun)


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
