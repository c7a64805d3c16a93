"""What the scripts have in common: the table of them, and a loop of compiled steps."""

from collections.abc import Callable
from typing import Any

import jax

import jaxkfac as jk

# A script trains by an optimizer (None is the default) from a seed, and returns its losses.
Script = Callable[[Any, int], list[float]]

SCRIPTS: dict[str, Script] = {}


def script(name: str) -> Callable[[Script], Script]:
    """Enter a script under the name that the table shows."""

    def enter(run: Script) -> Script:
        SCRIPTS[name] = run
        return run

    return enter


def end(losses: list[float]) -> float:
    """The mean of the last ten losses."""
    return sum(losses[-10:]) / len(losses[-10:])


def train(
    opt: jk.Optimizer,
    params: Any,
    batch_of: Callable[[jax.Array], Any],
    seed: int,
    *,
    steps: int = 100,
    state: Any = None,
) -> list[float]:
    """Losses of some steps, each on a new batch."""
    keys = jax.random.split(jax.random.key(seed), steps)
    opt_state = opt.init(params, jax.eval_shape(batch_of, keys[0]), keys[0], state=state)
    batch_of, step, losses = jax.jit(batch_of), jax.jit(opt.step), []
    for key in keys:
        params, opt_state, loss = step(params, opt_state, batch_of(key), key)
        losses.append(float(loss))
    jk.check_state(opt_state)
    return losses
