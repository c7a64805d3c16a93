"""What an optimizer would hold, from the shapes of what it trains."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import optax
from jaxtyping import PyTree

from jaxkfac.curvature import Eigenbases, Inverses
from jaxkfac.factors import Factors
from jaxkfac.planning._shapes import nbytes, nodes_of


class Optimizer(NamedTuple):
    """What an optimizer holds.

    Attributes:
        state: Shapes of what ``init`` would allocate.
        nbytes: Without factors, bases and accumulators.
        averages: How many sets of factors it holds.
        bases: Bytes of its eigenbases, or inverses of factors; where it holds any, it decomposes
            inside its update.
        accumulators: Bytes of what it accumulates over micro-batches, 0 if it does not.
    """

    state: PyTree
    nbytes: int
    averages: int
    bases: int
    accumulators: int


def optimizer_state(
    tx: optax.GradientTransformation | None,
    params: PyTree,
    nbytes: Callable[[PyTree], int] = nbytes,
) -> Optimizer:
    """What ``tx.init`` would allocate, in bytes as ``nbytes`` counts them."""
    if tx is None:
        return Optimizer((), 0, 0, 0, 0)
    whole = state = jax.eval_shape(tx.init, params)
    multi = optax.MultiStepsState  # jk.multi_steps holds one, too
    accumulators = nbytes([x.acc_grads for x in nodes_of(state, multi)])
    state = jax.tree.map(
        lambda x: x._replace(acc_grads=None) if isinstance(x, multi) else x,
        state,
        is_leaf=lambda x: isinstance(x, multi),
    )
    kept = (Factors, Eigenbases, Inverses)
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kept))
    return Optimizer(
        whole,
        nbytes([x for x in leaves if not isinstance(x, kept)]),
        sum(isinstance(x, Factors) for x in leaves),
        nbytes([x for x in leaves if isinstance(x, Eigenbases | Inverses)]),
        accumulators,
    )
