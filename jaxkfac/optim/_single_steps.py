"""``multi_steps`` where every micro-batch is a step: nothing is summed, so nothing is stored."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from jaxkfac.factors import Factors, of_parameters, with_origin, without_loss_terms, zeros_like
from jaxkfac.interception import fast_convolutions
from jaxkfac.optim._accumulators import MemoryKind, check_memory
from jaxkfac.optim._adaptation import as_operator, check_batch
from jaxkfac.optim._multi_steps_state import (
    MultiStepsState,
    check_not_nested,
    check_statistics,
    factors_in,
    kfac_states,
)
from jaxkfac.optim._trees import (
    all_finite,
    cast_like,
    check_like_momentum,
    check_state,
    gradients_only,
    is_concrete,
    sum_dtype,
    with_constants,
)
from jaxkfac.optim._watch import check_factors_have_come, is_in_range

PyTree = Any


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

    def init(params: PyTree) -> MultiStepsState:
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
        updates: PyTree,
        state: Any,
        params: PyTree | None = None,
        *,
        factors: Factors | None = None,
        terms: ArrayLike | None = None,
        **extra: Any,
    ) -> tuple[PyTree, MultiStepsState]:
        grads = updates  # optax uses one word for inputs and outputs
        check_state("multi_steps", state, MultiStepsState)
        check_like_momentum(grads, {} if params is None else gradients_only(params))
        expected = like if like is not None else factors_in(state.inner)
        layers = () if expected is None else expected.layers
        if isinstance(factors, Factors) and not any(x.computed_from for x in layers):
            factors = of_parameters(factors)  # the form that the inner transformation keeps
        check_statistics(factors, terms, expected)
        if factors is None or factors.loss_terms is not None:  # collected at some steps
            for node in kfac_states(state.inner):
                check_factors_have_come(node.missed, node.stacked_average, expected, factors)
        if factors is not None:
            num_terms = factors.terms if factors.loss_terms is None else factors.loss_terms
            terms = num_terms if terms is None else terms
            assert expected is not None  # checked above
            factors = with_origin(without_loss_terms(factors), expected.origin)
            factors = without_empty(factors)
        elif expected is not None:  # they are collected at other steps
            factors = zeros_like(expected)
        count = jnp.asarray(terms, sum_dtype(gradients_only(grads), expected))
        some = count > 0
        # The NaN of 0/0 is no reason to count a batch as skipped: it is an empty one.
        finite = all_finite(gradients_only(grads)) | ~some
        ok = finite & all_finite(factors, count) & is_in_range(factors)
        left_out = state.skipped + (~ok).astype(jnp.int32)
        some &= ok
        if is_concrete(some):
            curvature = as_operator(extra.get("curvature"))
            check_batch(curvature, jnp.where(ok, count, jnp.zeros_like(count)), left_out)

        def run(inner_state: Any) -> tuple[PyTree, Any]:
            given = {} if factors is None else {"factors": factors}
            updates, inner_state = inner.update(grads, inner_state, params, **given, **extra)
            return cast_like(grads, updates), inner_state

        def wait(inner_state: Any) -> tuple[PyTree, Any]:
            return jax.tree.map(jnp.zeros_like, gradients_only(grads)), inner_state

        # A cond, not a select of every leaf; see ``once_where``.
        updates, inner_state = jax.lax.cond(some, fast_convolutions(run), wait, state.inner)
        counters = state.accumulation
        one_more = optax.safe_increment(counters.gradient_step)
        return with_constants(grads, updates), MultiStepsState(
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
    g_sums, diagonals, corrections = jax.tree.map(
        lambda f: jnp.where(has_terms, f, jnp.zeros_like(f)),
        (factors.g_sums, factors.diagonals, factors.corrections),
    )
    return dataclasses.replace(factors, g_sums=g_sums, diagonals=diagonals, corrections=corrections)
