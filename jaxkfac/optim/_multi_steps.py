"""Accumulation of gradients, factors and counts over micro-batches."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool

from jaxkfac._arguments import ArrayTree
from jaxkfac._errors import named, scalar
from jaxkfac.blocks import (
    Factors,
    check_like,
    shapes_of_turn,
    stored_like,
    with_origin,
    without_loss_terms,
    zeros_like,
)
from jaxkfac.optim._accumulators import (
    Accumulators,
    MemoryKind,
    Sums,
    check_memory,
    check_memory_kind,
    checked_accumulator_dtype,
)
from jaxkfac.optim._multi_steps_state import (
    MultiStepsState,
    check_not_nested,
    check_structure_of_turn,
    checked_statistics,
    factors_in,
    single_steps,
    updated_where,
    without_empty,
)
from jaxkfac.optim._quadratic_model import as_operator, check_batch
from jaxkfac.optim._trees import (
    all_finite,
    check_like_momentum,
    checked_state,
    gradients_only,
    is_concrete,
    sum_dtype,
)
from jaxkfac.optim._watch import is_in_range

Schedule = int | Callable[[Any], Any]

_WHOLE = "a whole number of micro-batches, or a function of the number of groups so far"


def has_updated(state: MultiStepsState) -> Bool[Array, ""]:
    """Whether the last call ended a group."""
    counters = state.accumulation
    return (jnp.asarray(counters.mini_step) == 0) & (jnp.asarray(counters.gradient_step) > 0)


def multi_steps(
    tx: optax.GradientTransformation,
    every_k_schedule: Schedule,
    *,
    like: Factors | None = None,
    accumulator_dtype: DTypeLike | None = None,
    accumulator_memory_kind: MemoryKind = "device",
) -> optax.GradientTransformationExtraArgs:
    r"""Combine every ``k`` micro-batches into one step of ``tx``, equal to one batch of them all.

    With $R_i$ the loss terms of micro-batch $i$ and $\nabla_i$ its mean gradient,
    ``optax.MultiSteps`` around ``optax.identity()`` accumulates the sums $\sum R_i \nabla_i$, the
    factors' sums and all counts. The pooled mean is
    $\sum R_i \nabla_i / \sum R_i$, so micro-batches with unequal masks have the weights that they
    have in one large batch. ``tx`` runs under ``lax.cond``, on the last micro-step of a group only.

    A micro-batch with a non-finite gradient or factor, or a factor above the square root of the
    largest number (1.8e19 in float32), or with a negative count, is left out with its count, and
    counted in ``state.skipped``; it is still one of the ``k``. A micro-batch without a loss term
    (count 0) adds no gradient and no output statistics, even if its gradient is the NaN
    of 0/0; its input rows exist and stay in A. A group without any loss term makes no
    update.

    Args:
        tx: The inner transformation. Factors are accumulated if its state holds an average
            of them (:func:`kfac` does, also inside ``optax.chain``) or ``like`` is given.
        every_k_schedule: ``k``, at least 1, or a function of the number of groups so far,
            as in ``optax.MultiSteps``.
        like: ``stats.factor_shapes(params, batch)``, for a ``tx`` that takes ``factors=``
            and has none in its state.
        accumulator_dtype: ``bfloat16``, ``float32`` or ``float64``, the dtype of sums
            between micro-steps; ``None`` for the dtype in which they are added. They are added in
            at least float32, and counts are kept in that dtype. In bfloat16 the mean gradient of 16
            unequal micro-batches is 0.4 % off, where rounding it once would give 0.17 %; for 1024,
            3 % (``pytest jaxkfac/optim/_accumulators_test.py -k bfloat16``). Dense factors in
            float32 lose nothing: one triangle takes the bytes of the full matrix in bfloat16.
        accumulator_memory_kind: ``"device"``, or ``"pinned_host"`` to keep sums in main memory
            between micro-steps: each update copies them to the device and back. The sums are
            equal bit by bit. On the CPU it has no effect.

    Returns:
        A transformation used on every micro-step as ``tx.update(grads, state, params,
        factors=factors)`` or, if there are no factors, or none at this micro-step,
        ``tx.update(grads, state, params, terms=count)``. ``grads`` belong to the micro-batch's mean
        loss, and ``terms`` is the number of loss terms in that mean. Its default is
        ``factors.loss_terms`` if factors are collected at some steps only (``every=``), else
        ``factors.terms``. Updates are zero except on the last micro-step of a group. Further
        keyword arguments (``bases=``) are not accumulated: ``tx`` gets those of the last
        micro-step.

    Raises:
        ValueError: when built, ``every_k_schedule < 1``, or an ``accumulator_dtype`` or memory
            other than the above; in ``init``, if ``tx`` holds different factors, has a
            ``multi_steps`` or ``optax.MultiSteps`` inside, or the device lacks the memory; in
            ``update``, if neither ``factors`` nor ``terms`` is given, if there is no accumulator
            for ``factors``, or if :func:`kfac` inside has received none by its second refresh
            (checked outside ``jit``; inside, see its ``state.missed``).

    Memory:
        None with ``every_k_schedule=1``, where the update is that of ``tx`` bit by bit. Otherwise
        one copy of gradients and factors, in float32, or in float64 if any of them is;
        half of that with the next narrower ``accumulator_dtype``. With ``"pinned_host"`` none
        of it is on the device while a gradient is computed; in ``update`` the arrays pass
        through it as temporaries.

    Warning:
        ``optax.MultiSteps`` cannot replace it, neither around :func:`kfac` nor around this:
        it passes on only the last micro-batch's factors, and nothing inside can detect that.

    Example:
        >>> import jax.numpy as jnp, jaxkfac as jk
        >>> params = {"kernel": jnp.ones((3, 2))}
        >>> objective = jk.Objective(lambda p, x: x @ p["kernel"], jk.Gaussian())
        >>> stats, batch = jk.value_grad_and_factors(objective), (jnp.eye(3), jnp.zeros((3, 2)))
        >>> value, grads, factors = stats(params, batch)
        >>> like = stats.factor_shapes(params, batch)
        >>> tx = jk.multi_steps(jk.kfac(0.1, like=like, damping=1.0), every_k_schedule=2)
        >>> state = tx.init(params)
        >>> for _ in range(2):
        ...     updates, state = tx.update(grads, state, params, factors=factors)
        ...     print(jk.has_updated(state), updates["kernel"][0].round(3))
        False [0. 0.]
        True [-0.02 -0.02]
    """
    every_k_schedule = _checked_schedule(every_k_schedule)
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise TypeError(f"tx: expected an optax transformation, as jk.kfac(...), got {named(tx)}")
    if like is not None:
        check_like(like)
        like = without_loss_terms(like)
    storage_dtype = checked_accumulator_dtype(accumulator_dtype)
    check_memory_kind(accumulator_memory_kind)
    inner = optax.with_extra_args_support(tx)
    if every_k_schedule == 1:
        return single_steps(inner, like, accumulator_memory_kind)
    groups = _Groups(inner, every_k_schedule, like, storage_dtype, accumulator_memory_kind)
    return optax.GradientTransformationExtraArgs(groups.init, groups.update)


def _checked_schedule(every_k_schedule: Schedule) -> Schedule:
    """A number of micro-batches as an ``int``; a function of the number of groups unchanged."""
    if callable(every_k_schedule):
        return every_k_schedule
    scalar("every_k_schedule", every_k_schedule, _WHOLE)
    if every_k_schedule < 1:
        raise ValueError(f"every_k_schedule must be at least 1, got {every_k_schedule}")
    if every_k_schedule != int(every_k_schedule):
        raise ValueError(f"every_k_schedule: expected {_WHOLE}, got {every_k_schedule}")
    return int(every_k_schedule)


@dataclasses.dataclass(frozen=True, eq=False)
class _Groups:
    """Groups of several micro-batches, each one step of ``inner``; see :func:`multi_steps`.

    Attributes:
        inner: The inner transformation.
        every_k_schedule: Micro-batches of a group, or a function of the number of groups so far.
        like: Factors that ``inner`` takes and does not keep in its state; ``None`` for none.
        storage_dtype: Dtype of sums between micro-steps; ``None`` for that of the additions.
        memory_kind: Memory of sums between micro-steps.
    """

    inner: optax.GradientTransformationExtraArgs
    every_k_schedule: Schedule
    like: Factors | None
    storage_dtype: Any
    memory_kind: MemoryKind

    def init(self, params: ArrayTree) -> MultiStepsState:
        check_memory(self.memory_kind, params)
        inner_state = self.inner.init(params)
        check_not_nested(inner_state)
        shapes = self.like if self.like is not None else factors_in(inner_state)
        if shapes is not None and shapes.turn is not None:
            shapes = shapes_of_turn(shapes)
        wide = sum_dtype(params, shapes)
        if self.storage_dtype is not None:
            wide = max(wide, self.storage_dtype, key=lambda dtype: dtype.itemsize)
        accumulators = self._accumulators(wide)
        if shapes is not None and accumulators.narrow:
            shapes = jax.eval_shape(Factors.unpacked, shapes)  # small matrices are packed too
        zeros = accumulators.zeros(gradients_only(params), shapes)
        return MultiStepsState(
            accumulation=self._counters(wide).init({})._replace(acc_grads=zeros),
            inner=inner_state,
            skipped=jnp.zeros((), jnp.int32),
            empty=jnp.zeros((), jnp.int32),
        )

    def update(
        self,
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
        stored = state.accumulation.acc_grads
        check_like_momentum(grads, stored["grads"])
        factors, terms = checked_statistics(factors, terms, stored["factors"], state.inner)
        if factors is not None:
            check_structure_of_turn(factors, stored["factors"])
        brings_factors, origin = factors is not None, getattr(factors, "origin", None)
        wide = stored["terms"].dtype
        accumulators = self._accumulators(wide)
        factors = _as_summed(factors, stored, accumulators)
        sums, ok = _sums(gradients_only(grads), factors, jnp.asarray(terms, wide), wide)
        if factors is not None and factors.turn is not None:
            sums = _with_group(sums, stored, factors.turn.number, ok & brings_factors)
        total, accumulation = self._added(sums, state.accumulation)
        skipped = state.skipped + (~ok).astype(jnp.int32)
        ended = jnp.asarray(self._counters(wide).has_updated(accumulation))
        some = total["terms"] > 0
        if is_concrete(ended) and ended:
            check_batch(as_operator(extra.get("curvature")), total["terms"], skipped)
        # Before the cond, whose operands are arrays: a sum in full width never becomes one.
        mean = _mean(grads, total)

        def run(inner_state: ArrayTree) -> tuple[ArrayTree, Any]:
            pooled = {}
            if factors is not None:
                group = _pooled(accumulators.unpacked(total)["factors"], factors)
                # The inner transformation reads in it which axes the group is reduced over.
                pooled["factors"] = with_origin(group, origin or group.origin)
            return self.inner.update(mean, inner_state, params, **pooled, **extra)

        updates, inner_state = updated_where(ended & some, run, grads, state.inner)
        return updates, MultiStepsState(
            accumulation=accumulation,
            inner=inner_state,
            skipped=skipped,
            empty=state.empty + (ended & ~some).astype(jnp.int32),
        )

    def _added(
        self, sums: Sums, accumulation: optax.MultiStepsState
    ) -> tuple[Sums, optax.MultiStepsState]:
        """Sums of the group with those of a micro-batch, folded, and what is stored of them."""
        stored: Any = accumulation.acc_grads
        wide = stored["terms"].dtype
        accumulators = self._accumulators(wide)
        loaded = accumulation._replace(acc_grads=accumulators.load(stored))
        total: Any
        with jax.numpy_dtype_promotion("standard"):  # optax multiplies arrays by booleans
            total, added = self._counters(wide).update(accumulators.packed(sums), loaded)
        stored = added.acc_grads
        return total, added._replace(acc_grads=accumulators.save(stored))

    def _counters(self, wide: np.dtype) -> optax.MultiSteps:
        """Optax's accumulation, of sums."""
        return optax.MultiSteps(
            optax.identity(), self.every_k_schedule, use_grad_mean=False, accumulator_dtype=wide
        )

    def _accumulators(self, wide: np.dtype) -> Accumulators:
        storage_dtype = wide if self.storage_dtype is None else self.storage_dtype
        return Accumulators(wide, storage_dtype, self.memory_kind)


def _as_summed(factors: Factors | None, stored: Sums, accumulators: Accumulators) -> Factors | None:
    """The factors of a micro-batch with the structure of the sums; zeros if none have come."""
    if factors is not None:
        factors = with_origin(without_loss_terms(factors), stored["factors"].origin)
        if accumulators.narrow:
            return factors.unpacked()  # packed later, the small ones too
        return stored_like(factors, stored["factors"])
    if stored["factors"] is None:
        return None
    shapes = jax.eval_shape(lambda sums: accumulators.unpacked(accumulators.load(sums)), stored)
    return zeros_like(shapes["factors"])  # they are collected at other micro-steps


def _mean(grads: ArrayTree, total: Sums) -> ArrayTree:
    """The mean gradient of a group, in the dtypes of ``grads``."""
    divisor = jnp.where(total["terms"] > 0, total["terms"], 1)
    return jax.tree.map(
        lambda g, t: g if isinstance(t, optax.MaskedNode) else (t / divisor).astype(g.dtype),
        grads,
        total["grads"],
    )


def _pooled(total: Factors, factors: Factors) -> Factors:
    """Factors of a group in the dtypes of a micro-batch's."""
    pooled = jax.tree.map(lambda f, t: t.astype(f.dtype), factors, total)
    return pooled if factors.turn is None else _with_number(pooled)


def _sums(
    grads: ArrayTree, factors: Factors | None, count: Array, dtype: np.dtype
) -> tuple[Sums, Bool[Array, ""]]:
    """The contribution of a micro-batch, zero if it is left out; and whether it counts."""
    some = count > 0
    grads = jax.tree.map(lambda g: jnp.where(some, g, jnp.zeros_like(g)), grads)
    if factors is not None:
        factors = without_empty(factors)

    def weighted(grads: ArrayTree) -> ArrayTree:
        return jax.tree.map(lambda g: count * g.astype(dtype), grads)

    ok = all_finite(weighted(grads), factors, count) & is_in_range(factors) & (count >= 0)
    contribution = (grads, factors, count)
    # A cond, not a select of every leaf; see ``once_where``. It selects the inputs, which may
    # be narrower than sums.
    grads, factors, count = jax.lax.cond(
        ok, lambda: contribution, lambda: jax.tree.map(jnp.zeros_like, contribution)
    )
    factors = jax.tree.map(lambda f: f.astype(dtype), factors)
    return {"grads": weighted(grads), "factors": factors, "terms": count}, ok


def _with_group(sums: Sums, stored: Sums, number: Array, comes: Bool[Array, ""]) -> Sums:
    """The contribution of a micro-batch whose sum with what is stored says the group so far.

    The stored number is 1 more than that of the group, so that 0 says that none has come; it is -1
    if micro-batches of two groups have come.
    """
    before = stored["factors"].turn.number
    this = jnp.where(number < 0, -1, number + 1).astype(before.dtype)
    after = jnp.where((before == 0) | (before == this), this, -jnp.ones_like(this))
    change = jnp.where(comes, after - before, jnp.zeros_like(this))
    turn = dataclasses.replace(sums["factors"].turn, number=change)
    return {**sums, "factors": dataclasses.replace(sums["factors"], turn=turn)}


def _with_number(factors: Factors) -> Factors:
    """Pooled factors with the number of their group in place of the stored one."""
    assert factors.turn is not None
    stored = factors.turn.number
    number = jnp.where(stored > 0, stored - 1, stored).astype(jnp.int32)
    return dataclasses.replace(factors, turn=dataclasses.replace(factors.turn, number=number))
