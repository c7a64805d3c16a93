"""Steps of this library's optimizers on a problem."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import jaxkfac as jk
from benchmarks.optimizers._loop import anneal
from benchmarks.optimizers._method import Setting, Steps
from benchmarks.optimizers._problem import Arrays, Problem

_LIKELIHOODS: dict[str, Any] = {
    "bernoulli": jk.Bernoulli(),
    "categorical": jk.Categorical(),
    "gaussian": jk.Gaussian(),
}


class Statistics(NamedTuple):
    """``loss(params, batch)`` with marks, its gradient with factors, and the factors' shapes."""

    loss: Any
    collect: Any
    like: Any


def marked(kind: str, outputs: Any, targets: Any, weight: float = 1.0) -> Any:
    """By the library's own marks."""
    return jk.mark_outputs(outputs, _LIKELIHOODS[kind], weight=weight)


def statistics(problem: Problem, data: Arrays, *, every: int = 1, fisher: Any = None) -> Statistics:
    """A problem's statistics; the Fisher type is the problem's own unless another is given."""

    def loss(params: Any, batch: Any) -> Any:
        return problem.loss(params, batch, marked)

    collect = jk.value_grad_and_factors(loss, fisher=fisher or problem.fisher, every=every)
    params = jax.tree.map(jnp.asarray, problem.initial(0))
    like = collect.factor_shapes(params, problem.batch(data, 0, 0), jax.random.key(0))
    return Statistics(loss, collect, like)


def steps(problem: Problem, data: Arrays, setting: Setting, **options: Any) -> Steps:
    """With ``options`` for ``jk.kfac``; where the model chooses a rate, it stands for itself."""
    period = setting["period"]
    every = max(1, period // 5)  # factors come five times from one refresh to the next
    loss, stats, like = statistics(problem, data, every=every)
    tx = jk.kfac(like=like, refresh_every=period, damping_mode="pi", **options)
    adapts = options["learning_rate"] == "quadratic"

    def step(carry: Any, batch: Any, key: Any, progress: Any) -> Any:
        params, state = carry
        value, grads, factors = stats(params, batch, key, step=state.step)
        model: dict[str, Any] = {}
        if adapts:
            model = {"value": value, "value_fn": functools.partial(loss, batch=batch)}
            model["curvature"] = jk.operators.ggn(loss, params, batch)
        updates, state = tx.update(grads, state, params, factors=factors, **model)
        if not adapts:
            updates = optax.tree.scale(anneal(progress), updates)
        return (optax.apply_updates(params, updates), state), value

    return Steps(lambda params: (params, tx.init(params)), step)


def documented(
    make: Callable[[Any, Setting], Any],
    *,
    every: int,
    adaptive: bool = False,
    fisher: Any = None,
) -> Callable[[Problem, Arrays, Setting], Steps]:
    """The steps of ``jk.Optimizer`` around the optimizer ``make(like, setting)``, which refreshes
    every ``every`` steps.
    """

    def build(problem: Problem, data: Arrays, setting: Setting) -> Steps:
        _, stats, like = statistics(problem, data, every=every, fisher=fisher)
        tx = make(like, setting)

        def step(carry: Any, batch: Any, key: Any, progress: Any) -> Any:
            params, state = carry
            value, grads, factors = stats(params, batch, key, step=state.step)
            model = stats.adaptation(params, batch, key) if adaptive else {}
            updates, state = tx.update(grads, state, params, factors=factors, **model)
            updates = updates if adaptive else optax.tree.scale(anneal(progress), updates)
            return (optax.apply_updates(params, updates), state), value

        return Steps(lambda params: (params, tx.init(params)), step)

    return build
