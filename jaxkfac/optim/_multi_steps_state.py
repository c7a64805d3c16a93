"""State of ``multi_steps``, checks of what it is given, and groups of a single micro-batch."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int

from jaxkfac._arguments import ArrayTree
from jaxkfac._errors import scalar
from jaxkfac.blocks import (
    Factors,
    check_factors,
    check_same_layers,
    check_turn,
    number_of_turns,
    of_parameters,
    shapes_of_turn,
    with_origin,
    without_loss_terms,
    zeros_like,
)
from jaxkfac.interception import fast_convolutions
from jaxkfac.optim._accumulators import MemoryKind, check_memory
from jaxkfac.optim._kfac_state import KfacState
from jaxkfac.optim._kfe_adam import KfeAdamState
from jaxkfac.optim._mapped_update import check_reduced
from jaxkfac.optim._quadratic_model import as_operator, check_batch
from jaxkfac.optim._spring import SpringState
from jaxkfac.optim._trees import (
    all_finite,
    cast_like,
    check_like_momentum,
    checked_state,
    gradients_only,
    is_concrete,
    states_of,
    sum_dtype,
    with_constants,
)
from jaxkfac.optim._watch import check_factors_have_come, is_in_range


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
            ``tx.init(params)``. They hold the arrays of a step of factors that come in turns, and
            the number of the group plus 1.
        inner: State of the inner transformation.
        skipped: Micro-batches left out because a gradient or factor was not finite, a factor
            too large, or their count negative, int32.
        empty: Groups that ended without a single loss term, and so without an update,
            int32.
    """

    accumulation: optax.MultiStepsState
    inner: Any
    skipped: Int[Array, ""]
    empty: Int[Array, ""]


def check_not_nested(state: ArrayTree) -> None:
    """Refuse an inner transformation that accumulates: groups would look like micro-batches."""
    names = {MultiStepsState: "jk.multi_steps", optax.MultiStepsState: "optax.MultiSteps"}
    for node in jax.tree.leaves(state, is_leaf=lambda x: type(x) in names):
        if type(node) in names:
            raise ValueError(
                f"tx accumulates micro-batches already: {names[type(node)]} is inside it. Use one "
                "jk.multi_steps, around everything else, and give it the product of the two "
                "numbers of micro-batches"
            )
    if states_of(state, SpringState):
        raise ValueError(
            "tx: jk.spring is inside it, whose step solves a system of the rows of one batch, and "
            "rows of several micro-batches cannot be added up: give jk.spring the batch at once, "
            "or fewer rows, drawn anew at every step (jk.draw_rows)"
        )


def check_structure_of_turn(factors: Factors, stored: Factors) -> None:
    """Refuse factors that come in turns and lack layers, because sums have one structure."""
    layers = filter(stored.has_arrays_of, stored.layers)
    absent = [layer.name for layer in layers if not factors.has_arrays_of(layer)]
    if absent:
        raise ValueError(
            f"multi_steps: the factors of this step lack layer {absent[0]!r}, which comes in "
            "another turn (collect=), and sums have one structure for all turns: pass "
            "stats(..., step=) a traced number, with which layers outside of scans come at "
            "every step; a program without a scan cannot be accumulated in turns"
        )


def factors_in(state: ArrayTree) -> Factors | None:
    """The factors that an inner transformation averages, if any."""
    ours = KfacState, KfeAdamState
    types = (Factors, *ours)
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, types))
    averages = [x.stacked_average for x in nodes if isinstance(x, ours)]
    nodes = [node.statistics if isinstance(node, ours) else node for node in nodes]
    all_factors = [without_loss_terms(node) for node in nodes if isinstance(node, Factors)]
    for more in all_factors[1:]:
        check_same_layers(more, all_factors[0])
    if not all_factors:
        return None
    return functools.reduce(Factors.packed_like, averages, all_factors[0])


def checked_statistics(
    factors: Factors | None, terms: ArrayLike | None, stored: Factors | None, inner: Any
) -> tuple[Factors | None, ArrayLike | None]:
    """A micro-batch's factors in the form that is stored, and its number of loss terms.

    Args:
        factors: Factors that ``update`` was given.
        terms: Number of loss terms that it was given; ``None`` takes that of the factors.
        stored: Factors that the state keeps, or their shapes.
        inner: State of the inner transformation.

    Raises:
        ValueError: what was given does not fit the state, or factors are due and have not come.
    """
    layers = () if stored is None else stored.layers
    if isinstance(factors, Factors) and not any(x.computed_from for x in layers):
        factors = of_parameters(factors)  # the form that the inner transformation keeps
    _check_statistics(factors, terms, stored)
    check_reduced("multi_steps", factors)
    if factors is None or factors.loss_terms is not None:  # collected at some steps
        for node in states_of(inner, KfacState):
            check_factors_have_come(node.missed, node.stacked_average, stored, factors)
    if factors is not None and terms is None:
        terms = factors.terms if factors.loss_terms is None else factors.loss_terms
    return factors, terms


def updated_where(
    due: Bool[Array, ""],
    update: Callable[[Any], tuple[ArrayTree, Any]],
    grads: ArrayTree,
    inner_state: Any,
) -> tuple[ArrayTree, Any]:
    """``update(inner_state)`` where it is due; otherwise zeros, and the state as it is."""

    def run(inner_state: ArrayTree) -> tuple[ArrayTree, Any]:
        updates, inner_state = update(inner_state)
        return cast_like(grads, updates), inner_state

    def wait(inner_state: ArrayTree) -> tuple[ArrayTree, Any]:
        return jax.tree.map(jnp.zeros_like, gradients_only(grads)), inner_state

    # A cond, not a select of every leaf; see ``once_where``.
    updates, inner_state = jax.lax.cond(due, fast_convolutions(run), wait, inner_state)
    return with_constants(grads, updates), inner_state


def _check_statistics(
    factors: Factors | None, terms: ArrayLike | None, stored: Factors | None
) -> None:
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
        check_turn("factors", factors.turn, number_of_turns(stored.turn))
        if (factors.corrections is None) != (stored.corrections is None):
            raise ValueError(
                "eigenvalues measured in eigenbases (bases=) are accumulated from the first "
                "micro-step on or never: build jk.kfac with like=stats.factor_shapes(params, "
                "batch, bases=...), and hand bases= to every call of stats"
            )


# ---------------- every micro-batch is a step: nothing is summed, so nothing is stored


def single_steps(
    inner: optax.GradientTransformationExtraArgs, like: Factors | None, memory_kind: MemoryKind
) -> optax.GradientTransformationExtraArgs:
    """:func:`jaxkfac.multi_steps` with ``every_k_schedule=1``.

    The state counts and the update skips as for groups of several micro-batches, but the
    gradient and the factors reach ``inner`` as they come.

    Args:
        inner: The inner transformation.
        like: Factors that it takes and does not keep in its state; ``None`` for none.
        memory_kind: Memory of accumulators; checked like that of larger groups.
    """

    def init(params: ArrayTree) -> MultiStepsState:
        check_memory(memory_kind, params)
        inner_state = inner.init(params)
        check_not_nested(inner_state)
        factors_in(inner_state)
        counters = optax.MultiSteps(optax.identity(), 1).init({})
        nothing = {"grads": None, "factors": None, "terms": None}
        return MultiStepsState(
            accumulation=counters._replace(acc_grads=nothing),
            inner=inner_state,
            skipped=jnp.zeros((), jnp.int32),
            empty=jnp.zeros((), jnp.int32),
        )

    def update(
        updates: ArrayTree,
        state: Any,
        params: ArrayTree | None = None,
        *,
        factors: Factors | None = None,
        terms: ArrayLike | None = None,
        **extra: Any,
    ) -> tuple[ArrayTree, MultiStepsState]:
        grads = updates  # optax uses one word for inputs and outputs
        state = checked_state("multi_steps: the state", state, MultiStepsState)
        check_like_momentum(grads, {} if params is None else gradients_only(params))
        expected = like if like is not None else factors_in(state.inner)
        factors, terms = checked_statistics(factors, terms, expected, state.inner)
        if factors is not None:
            assert expected is not None  # checked above
            if factors.origin is None:
                factors = with_origin(factors, expected.origin)
            factors = without_empty(without_loss_terms(factors))
        elif expected is not None:  # they are collected at other steps
            factors = zeros_like(expected if expected.turn is None else shapes_of_turn(expected))
        count = jnp.asarray(terms, sum_dtype(gradients_only(grads), expected))
        some = count > 0
        # The NaN of 0/0 is no reason to count a batch as skipped: it is an empty one.
        finite = all_finite(gradients_only(grads)) | ~some
        ok = finite & all_finite(factors, count) & is_in_range(factors) & (count >= 0)
        left_out = state.skipped + (~ok).astype(jnp.int32)
        some &= ok
        if is_concrete(some):
            curvature = as_operator(extra.get("curvature"))
            check_batch(curvature, jnp.where(ok, count, jnp.zeros_like(count)), left_out)

        def run(inner_state: ArrayTree) -> tuple[ArrayTree, Any]:
            given = {} if factors is None else {"factors": factors}
            return inner.update(grads, inner_state, params, **given, **extra)

        updates, inner_state = updated_where(some, run, grads, state.inner)
        counters = state.accumulation
        one_more = optax.safe_increment(counters.gradient_step)
        return updates, MultiStepsState(
            accumulation=counters._replace(gradient_step=one_more),
            inner=inner_state,
            skipped=left_out,
            empty=state.empty + (~some).astype(jnp.int32),
        )

    return optax.GradientTransformationExtraArgs(init, update)


def without_empty(factors: Factors) -> Factors:
    """Factors whose output statistics are zero if no loss term was counted.

    Without a loss term they are empty sums, whatever 0/0 made of them.
    """
    has_terms = factors.terms > 0

    def or_zero(x: Array) -> Array:
        return jnp.where(has_terms, x, jnp.zeros_like(x))

    sides = {
        place: side if place.table == "a" else side.with_data(or_zero(side.data))
        for place, side in factors.sides.items()
    }
    return factors.with_sides(sides, corrections=jax.tree.map(or_zero, factors.corrections))
