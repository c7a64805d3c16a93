"""State of ``multi_steps``, and checks of what it is given."""

from typing import Any, NamedTuple

import jax
import optax
from jaxtyping import Array, Int

from jaxkfac._errors import scalar
from jaxkfac.factors import Factors, check_factors, check_same_layers, without_loss_terms
from jaxkfac.optim._kfac_state import KfacState
from jaxkfac.optim._kfe_adam import KfeAdamState

PyTree = Any


class MultiStepsState(NamedTuple):
    """State of :func:`multi_steps`.

    Attributes:
        accumulation: ``optax.MultiStepsState`` whose ``acc_grads`` are
            ``{"grads": count * gradient, "factors": Factors or None, "terms": count}``,
            all sums (none with ``every_k_schedule=1``, where nothing is summed), and whose
            ``mini_step`` and ``gradient_step`` count micro-steps in the group and groups. With a
            narrower ``accumulator_dtype``, gradients and diagonals are means so far, and a dense
            factor is a rectangle that holds one triangle of its sum, in twice the width. With
            ``"pinned_host"``, all arrays except the counts are in that memory; a restored state
            returns there at its next update, or is placed there by the shardings of
            ``tx.init(params)``.
        inner: State of the inner transformation.
        skipped: Micro-batches left out because a gradient or factor was not finite, or a factor
            too large, int32.
        empty: Groups that ended without a single loss term, and so without an update,
            int32.
    """

    accumulation: optax.MultiStepsState
    inner: Any
    skipped: Int[Array, ""]
    empty: Int[Array, ""]


def check_not_nested(state: Any) -> None:
    """Refuse an inner transformation that accumulates: groups would look like micro-batches."""
    names = {MultiStepsState: "jk.multi_steps", optax.MultiStepsState: "optax.MultiSteps"}
    for node in jax.tree.leaves(state, is_leaf=lambda x: type(x) in names):
        if type(node) in names:
            raise ValueError(
                f"tx accumulates micro-batches already: {names[type(node)]} is inside it. Use one "
                "jk.multi_steps, around everything else, and give it the product of the two "
                "numbers of micro-batches"
            )


def kfac_states(state: Any) -> list[KfacState]:
    """The states of :func:`jaxkfac.kfac` inside a state."""
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, KfacState))
    return [node for node in nodes if isinstance(node, KfacState)]


def factors_in(state: Any) -> Factors | None:
    """The factors that an inner transformation averages, if any."""
    ours = KfacState, KfeAdamState
    types = (Factors, *ours)
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, types))
    is_packed = any(isinstance(x, ours) and x.stacked_average.is_packed for x in nodes)
    nodes = [node.statistics if isinstance(node, ours) else node for node in nodes]
    all_factors = [without_loss_terms(node) for node in nodes if isinstance(node, Factors)]
    for more in all_factors[1:]:
        check_same_layers(more, all_factors[0])
    if not all_factors:
        return None
    return all_factors[0].packed() if is_packed else all_factors[0]


def check_statistics(factors: Any, terms: Any, stored: Factors | None) -> None:
    """Refuse an update without counts, or with factors other than those that are expected.

    Args:
        factors: ``factors=`` of the update.
        terms: ``terms=`` of the update.
        stored: The factors for which ``init`` made the state; ``None`` if there are none.
    """
    if factors is None and terms is None:
        raise ValueError(
            "multi_steps weighs micro-batches by their number of loss terms: pass factors=, or "
            "terms=, got neither"
        )
    if terms is not None:
        scalar("terms", terms, "the number of loss terms of this micro-batch, as mask.sum()")
    if factors is not None:
        if stored is None:
            raise ValueError(
                "there is no accumulator for factors=: the inner transformation keeps none in "
                "its state; pass like=stats.factor_shapes(params, batch) to multi_steps, or "
                "terms= if it needs no factors"
            )
        check_factors(factors, stored)
        if (factors.corrections is None) != (stored.corrections is None):
            raise ValueError(
                "eigenvalues measured in eigenbases (bases=) are accumulated from the first "
                "micro-step on or never: build jk.kfac with like=stats.factor_shapes(params, "
                "batch, bases=...), and hand bases= to every call of stats"
            )
