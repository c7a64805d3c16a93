"""What is compared: optimizers that run here, each a step to be compiled."""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from benchmarks.optimizers._loop import anneal, train
from benchmarks.optimizers._problem import Arrays, Problem, unmarked

Setting = Mapping[str, Any]

_CONSTANT = "constant"


class Method(NamedTuple):
    """An optimizer, and the few settings that are tried.

    Attributes:
        name: On the command line and in the record.
        title: On the page.
        settings: Those of the grid at equal time; without any, it is not compared there.
        run: ``run(problem, data, setting, seed=, budget=, steps=)``, a curve with
            ``compile_cpu_s``.
        only: Names of the problems it is for; ``None`` is all of them.
        documented: Settings that its own documentation gives, the usual one first. Nothing chooses
            among them.
        choices: Settings of which seed 0 chooses the best at equal steps.
        timed: Whether runs with the usual setting go on to the problem's CPU seconds.
    """

    name: str
    title: str
    settings: tuple[Setting, ...]
    run: Callable[..., dict[str, Any]]
    only: frozenset[str] | None = None
    documented: tuple[Setting, ...] = ()
    choices: tuple[Setting, ...] = ()
    timed: bool = False

    def is_for(self, problem: Problem) -> bool:
        """Whether the problem is one of its problems."""
        return self.only is None or problem.name in self.only


class Steps(NamedTuple):
    """``init(params)``, a carry that begins with them; ``step(carry, batch, key, progress)``."""

    init: Callable[[Any], Any]
    step: Callable[[Any, Any, Any, Any], tuple[Any, Any]]


class _Compiled(NamedTuple):
    """``Steps``, compiled, and CPU seconds; a step takes the traced numbers of a setting too."""

    init: Callable[[Any], Any]
    step: Callable[..., tuple[Any, Any]]
    cpu_s: float


def constant(settings: Iterable[Setting]) -> tuple[Setting, ...]:
    """These settings with a learning rate that stays; without this mark it is annealed."""
    return tuple({**setting, _CONSTANT: True} for setting in settings)


def here(
    build: Callable[[Problem, Arrays, Setting], Steps], *, traced: Sequence[str] = ()
) -> Callable[..., dict[str, Any]]:
    """Runs of an optimizer in this process; what compiling costs is told apart.

    The last program is kept. The seeds of a setting share it, and so do settings that differ only
    in the numbers named in ``traced``, which are arguments of the compiled step.
    """
    kept: dict[tuple[Problem, str], _Compiled] = {}

    def run(
        problem: Problem,
        data: Arrays,
        setting: Setting,
        *,
        seed: int,
        budget: float,
        steps: int = 0,
    ) -> dict[str, Any]:
        setting = dict(setting)
        stays = setting.pop(_CONSTANT, False)
        numbers = {name: setting.pop(name) for name in traced if name in setting}
        key = problem, json.dumps([setting, list(numbers)])
        if key not in kept:
            kept.clear()
            jax.clear_caches()
            kept[key] = _compiled(build, problem, data, setting, numbers)
        init, compiled, spent = kept[key]
        arguments = {name: jnp.float32(x) for name, x in numbers.items()}

        def timed(carry: Any, batch: Any, number: int, progress: float) -> Any:
            passed = jnp.float32(0 if stays else progress)
            return compiled(carry, batch, jnp.int32(seed), jnp.int32(number), passed, arguments)

        start = init(problem.initial(seed))
        curve = train(timed, start, problem, data, seed=seed, budget=budget, steps=steps)
        return {"compile_cpu_s": spent, **curve}

    return run


def _compiled(
    build: Callable[[Problem, Arrays, Setting], Steps],
    problem: Problem,
    data: Arrays,
    setting: Setting,
    numbers: Mapping[str, float],
) -> _Compiled:
    begun = time.process_time()
    steps = build(problem, data, {**setting, **numbers})

    def init(params: Any) -> Any:
        carry = steps.init(jax.tree.map(jnp.asarray, params))
        return jax.tree.map(jnp.copy, carry)  # leaves are donated: none may be another's buffer

    def step(carry: Any, batch: Any, seed: Any, number: Any, progress: Any, numbers: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(seed), number)
        traced = build(problem, data, {**setting, **numbers}) if numbers else steps
        return traced.step(carry, batch, key, progress)

    zero, numbers = jnp.int32(0), {name: jnp.float32(x) for name, x in numbers.items()}
    first = init(problem.initial(0)), problem.batch(data, 0, 0), zero, zero, jnp.float32(0), numbers
    compiled = jax.jit(step, donate_argnums=0).lower(*first).compile()
    return _Compiled(init, compiled, time.process_time() - begun)


def first_order(
    make: Callable[[Setting], optax.GradientTransformation],
    *,
    traced: Sequence[str] = ("learning_rate",),
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

    return here(build, traced=traced)
