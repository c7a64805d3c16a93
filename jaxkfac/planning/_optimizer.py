"""What an optimizer would hold, from the shapes of what it trains."""

from typing import NamedTuple

import jax
import optax
from jaxtyping import PyTree

from jaxkfac.curvature import Eigenbases
from jaxkfac.factors import Factors
from jaxkfac.optim._multi_steps import MultiStepsState
from jaxkfac.planning._shapes import nbytes


class Optimizer(NamedTuple):
    """What an optimizer holds.

    Attributes:
        nbytes: Without factors and bases.
        averages: How many sets of factors it holds.
        bases: Whether it holds eigenbases, and so decomposes inside its update.
        accumulates: Whether it accumulates micro-batches.
    """

    nbytes: int
    averages: int
    bases: bool
    accumulates: bool


def optimizer_state(tx: optax.GradientTransformation | None, params: PyTree) -> Optimizer:
    """What ``tx.init`` would allocate."""
    if tx is None:
        return Optimizer(0, 0, False, False)
    state = jax.eval_shape(tx.init, params)
    kept = (Factors, Eigenbases)
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kept))
    accumulators = (MultiStepsState, optax.MultiStepsState)
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, accumulators))
    return Optimizer(
        nbytes([x for x in leaves if not isinstance(x, kept)]),
        sum(isinstance(x, Factors) for x in leaves),
        any(isinstance(x, Eigenbases) for x in leaves),
        any(isinstance(x, accumulators) for x in nodes),
    )
