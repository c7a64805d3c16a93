"""Learning rate, momentum and damping that the quadratic model of the loss chooses."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxkfac._arguments import ArrayTree, check_function, leaves_by_path, with_leaves
from jaxkfac._errors import instance_of, scalar
from jaxkfac.curvature.operators import Operator, ggn
from jaxkfac.factors import BatchCurvature
from jaxkfac.interception import fast_convolutions
from jaxkfac.linalg.spectral import Damping
from jaxkfac.optim._levenberg_marquardt import (
    Leaves,
    LevenbergMarquardt,
    Minimum,
    QuadraticModel,
    dot,
    minimum,
)
from jaxkfac.optim._schedules import may_be_positive
from jaxkfac.optim._trees import (
    GatheredOperator,
    advance_momentum,
    all_finite,
    checked_value,
    descend,
    gathered,
    is_concrete,
    scaled,
    sharded_like,
    sum_dtype,
    where,
)

Scalar = Float[Array, ""]
_EVERY = 5  # updates between two trials if the damping is given


class AdaptationState(NamedTuple):
    r"""The numbers that :func:`jaxkfac.kfac` adapts, and the result of the last trial.

    Numbers are in float32, or in float64 if any parameter is.

    Attributes:
        damping: $\lambda$ of the next update; if ``optax.inject_hyperparams`` gives it, of the
            last one.
        ratio: $\rho$ of the last trial, the actual change of the loss over the model's. 1 before
            the first trial, and if the model predicts no change.
        factor_damping: $\gamma^2$, the damping of the factors at the next update, weight decay
            included; the model's damping if the factors have none of their own.
        learning_rate: That of the last update.
        momentum: That of the last update.
        first_damping: $\lambda$ of the first update; if the damping is given, that of ``init``.
        rejected: Updates not made because the model or the loss after the step was not finite, or
            because the loss of the batch rose, int32.
        disagreed: Updates among ``rejected`` after which the loss rose although the model's change
            was below the rounding of the loss, int32: ``value`` and ``value_fn`` are not the same
            loss.
        burned_in: Updates that only averaged the factors, int32.
        displaced: Updates that found the parameters elsewhere than the last one should have left
            them, int32: something after ``kfac`` changes its updates. Only the component along the
            stored momentum is checked, so changes that are orthogonal to it, or small along it, go
            unnoticed.
        position: Inner product of the stored momentum with the parameters after the last update.
        travelled: Inner product of the stored momentum with that update.
    """

    damping: Scalar
    ratio: Scalar
    factor_damping: Scalar
    learning_rate: Scalar
    momentum: Scalar
    first_damping: Scalar
    rejected: Int[Array, ""]
    disagreed: Int[Array, ""]
    burned_in: Int[Array, ""]
    displaced: Int[Array, ""]
    position: Scalar
    travelled: Scalar


@runtime_checkable
class AdaptedState(Protocol):
    """What the adaptation reads in the state of ``kfac``."""

    @property
    def momentum(self) -> ArrayTree: ...
    @property
    def adaptation(self) -> Any: ...


class BatchLoss(NamedTuple):
    """The loss of an update's batch: its value, the loss as a function, and its curvature."""

    value: Any
    value_fn: Callable[[ArrayTree], Any]
    curvature: Operator

    def of_whole(self, params: ArrayTree) -> "BatchLoss":
        """The same loss for parameters gathered on every device, if ``params`` are sharded."""
        return BatchLoss(
            gathered(self.value),
            lambda moved: gathered(self.value_fn(sharded_like(moved, params))),
            GatheredOperator(self.curvature, params),
        )


class Numbers(NamedTuple):
    """The numbers of an update; ``None`` for those that the model chooses."""

    rate: Any
    momentum: Any
    decay: Any


@dataclasses.dataclass(frozen=True)
class Adaptation:
    """Which of rate, momentum and damping are adapted, and how.

    Attributes:
        rate: Whether the model chooses the learning rate.
        momentum: Whether the model chooses the momentum.
        rule: The rule of the damping, or ``None`` if the damping is given.
    """

    rate: bool
    momentum: bool
    rule: LevenbergMarquardt | None

    @staticmethod
    def of(
        learning_rate: object, momentum: object, damping: object, norm_constraint: object
    ) -> "Adaptation | None":
        """The adaptation that the arguments of ``kfac`` request; ``None`` if all are given.

        Raises:
            ValueError: a string other than ``"quadratic"``, or an argument that does not go with
                it.
            TypeError: a string as damping.
        """
        for name, choice in (("learning_rate", learning_rate), ("momentum", momentum)):
            if isinstance(choice, str) and choice != "quadratic":
                raise ValueError(f'{name}={choice!r}: expected a number or "quadratic"')
        if isinstance(damping, str):
            raise TypeError(
                f'damping={damping!r}: expected "auto", a number, a schedule, a pair of them, or '
                "jk.LevenbergMarquardt() to adapt it"
            )
        rule = damping if isinstance(damping, LevenbergMarquardt) else None
        out = Adaptation(isinstance(learning_rate, str), isinstance(momentum, str), rule)
        if out.by_model and isinstance(damping, tuple):
            raise ValueError(
                "damping: the quadratic model has one damping, and a pair has one for each "
                'factor: give a number or jk.LevenbergMarquardt(), and damping_mode="pi"'
            )
        if out.rate and norm_constraint is not None:
            raise ValueError(
                'norm_constraint bounds a learning rate that is given, and "quadratic" chooses '
                "one: leave it out"
            )
        return out if out.by_model or rule else None

    @property
    def by_model(self) -> bool:
        """Whether the model includes the weight decay, and momentum is the last update."""
        return self.rate or self.momentum

    @property
    def burn_in(self) -> int:
        """Number of updates that only average the factors."""
        return 0 if self.rule is None else self.rule.burn_in

    @property
    def two_dampings(self) -> bool:
        """Whether the factors have a damping of their own."""
        return self.by_model and self.rule is not None and self.rule.factor_every > 0

    @property
    def guarded(self) -> bool:
        """Whether a step that raises the loss of its batch is rejected."""
        return self.rule is not None and self.rule.safeguard

    def initial(self, params: ArrayTree, damping: ArrayLike, decay: ArrayLike) -> AdaptationState:
        """The state before the first update; ``decay`` is the weight decay."""
        dtype = sum_dtype(params)

        def number(value: ArrayLike) -> Scalar:  # a buffer for each number: a state may be donated
            return jnp.array(value, dtype)

        def count() -> Int[Array, ""]:
            return jnp.zeros((), jnp.int32)

        return AdaptationState(
            damping=number(damping),
            ratio=number(1),
            factor_damping=number(damping + (decay if self.by_model else 0.0)),
            learning_rate=number(0),
            momentum=number(0),
            first_damping=number(damping),
            rejected=count(),
            disagreed=count(),
            burned_in=count(),
            displaced=count(),
            position=number(0),
            travelled=number(0),
        )

    def loss(
        self, params: ArrayTree, value: ArrayLike | None, value_fn: Any, curvature: Any
    ) -> BatchLoss:
        """Check the arguments that describe the loss of a batch, and collect them.

        Raises:
            TypeError: an argument of another type.
            ValueError: an argument is missing.
        """
        arguments = {"params": params, "value": value, "value_fn": value_fn, "curvature": curvature}
        absent = [name for name, x in arguments.items() if x is None]
        if absent:
            raise ValueError(
                f"a kfac that adapts itself needs {' and '.join(absent)}: tx.update(grads, state, "
                "params, factors=factors, **stats.adaptation(params, batch, key)); or take an "
                "optimizer that needs none of them, jk.kfe_adam(0.01) or jk.kfac(0.1), as for a "
                "loss with loss_terms=, whose outputs are not known"
            )
        checked_value(value)
        if isinstance(curvature, BatchCurvature):
            curvature.check_params(params)
            curvature = as_operator(curvature)
        check_function("value_fn", value_fn, "value_fn(params), the loss of this batch")
        instance_of(
            "curvature", curvature, Operator, "as jk.operators.ggn(objective, params, batch)"
        )
        return BatchLoss(value, value_fn, curvature)

    def check(
        self, state: AdaptedState, params: ArrayTree, terms: ArrayLike | None, loss: BatchLoss
    ) -> None:
        """Refuse what concrete values show to be wrong, outside ``jit``.

        Args:
            state: State of ``kfac``.
            params: The parameters of the update.
            terms: Loss terms of the gradient's batch, or ``None``.
            loss: Loss of the batch.

        Raises:
            ValueError: the curvature belongs to another batch, or the parameters are not where the
                last update should have left them.
        """
        check_batch(loss.curvature, terms)
        displaced = self._displaced(state, params)
        if is_concrete(displaced) and displaced:
            raise ValueError(
                "kfac: the parameters are not where its last update should have left them, so that "
                'update is no direction for momentum="quadratic", nor what the model predicted: '
                "jk.kfac must stand last in optax.chain; after a change of your own, start "
                "again with tx.init(params)"
            )

    def begun(
        self,
        state: Any,
        gradient: ArrayTree,
        loss: BatchLoss,
        step: Int[Array, ""],
        decay: ArrayLike,
    ) -> Any:
        """The state of ``kfac``, at the first update with the damping that the curvature gives.

        Args:
            state: State of ``kfac``.
            gradient: From :meth:`gradient_of`.
            loss: Loss of the batch.
            step: Updates so far.
            decay: The weight decay.
        """
        if self.rule is None or self.rule.initial != "auto" or (is_concrete(step) and step > 0):
            return state
        rule, adapted, is_first = self.rule, state.adaptation, step == 0
        dtype, slope = adapted.damping.dtype, _at(gradient, leaves_by_path(state.momentum))

        def first_damping() -> Scalar:
            model = QuadraticModel(slope, loss.curvature, jnp.zeros((), dtype))
            second, first = model.along(slope)
            return rule.initial_at(second[0, 0] / first[0]).astype(dtype)

        damping = jax.lax.cond(
            is_first, fast_convolutions(first_damping), lambda: adapted.first_damping
        )
        factor_damping = damping + (decay if self.by_model else 0.0)
        adapted = adapted._replace(
            first_damping=damping,
            damping=jnp.where(is_first, damping, adapted.damping),
            factor_damping=jnp.where(is_first, factor_damping, adapted.factor_damping),
        )
        return state._replace(adaptation=adapted)

    def numbers_of(self, rate: ArrayLike, momentum: ArrayLike, decay: ArrayLike) -> Numbers:
        """The numbers of an update, except those that the model chooses."""
        return Numbers(None if self.rate else rate, None if self.momentum else momentum, decay)

    def damping_of(self, state: AdaptedState, numbers_of: Damping, decay: ArrayLike) -> Any:
        r"""$\lambda$ of an update, plus $w$ if the model includes the weight decay."""
        damping = numbers_of if self.rule is None else state.adaptation.damping
        return damping + decay if self.by_model else damping

    def factor_damping_of(self, state: AdaptedState, damping: Damping) -> Any:
        """The damping of the factors before any trial; the model's ``damping`` without its own."""
        return state.adaptation.factor_damping if self.two_dampings else damping

    def is_trial_due(self, step: ArrayLike, refresh_every: ArrayLike) -> Any:
        """Whether the factors' damping is tried at an update, provided that it refreshes."""
        assert self.rule is not None
        periods = jnp.maximum(1, jnp.round(self.rule.factor_every / jnp.asarray(refresh_every)))
        return (step % (refresh_every * periods.astype(jnp.int32)) == 0) & (step > 0)

    def tried_factor_damping(
        self,
        state: AdaptedState,
        gradient: ArrayTree,
        direction: Callable[[Scalar], ArrayTree],
        damping: ArrayLike,
        loss: BatchLoss,
        numbers: Numbers,
        *,
        due: Bool[Array, ""],
    ) -> Scalar:
        """The factors' damping after a trial, if one is due.

        Args:
            state: State of ``kfac``.
            gradient: From :meth:`gradient_of`.
            direction: Maps a damping of the factors to the preconditioned gradient.
            damping: From :meth:`damping_of`.
            loss: Loss of the batch.
            numbers: The numbers that the model does not choose.
            due: Whether there is a trial.
        """
        assert self.rule is not None
        adapted: AdaptationState = state.adaptation
        dampings = self.rule.factor_dampings(adapted.factor_damping)
        dtype, last = adapted.damping.dtype, leaves_by_path(state.momentum)

        def change(factor_damping: Scalar) -> Scalar:
            steps = _at(direction(factor_damping), last)
            model = QuadraticModel(_at(gradient, last), loss.curvature, jnp.asarray(damping, dtype))
            return self._minimum(model, steps, last, numbers).change

        def trial() -> Scalar:
            # One after the other in a loop, which compiles only one of them.
            changes = jax.lax.map(change, dampings)
            return dampings[jnp.argmin(jnp.where(jnp.isfinite(changes), changes, jnp.inf))]

        return jax.lax.cond(due, fast_convolutions(trial), lambda: adapted.factor_damping)

    def gradient_of(
        self, grads: ArrayTree, params: ArrayTree, moving: ArrayTree, decay: ArrayLike
    ) -> ArrayTree:
        """The gradient of the model's objective, with weight decay if the model includes it."""
        if not (self.by_model and may_be_positive(decay)):
            return grads
        leaves = leaves_by_path(grads)
        at = _at(params, leaves_by_path(moving))
        decayed = {
            path: leaves[path] + scaled(decay, x.astype(leaves[path].dtype))
            for path, x in at.items()
        }
        return with_leaves(grads, decayed)

    def _displaced(self, state: AdaptedState, params: ArrayTree) -> Bool[Array, ""]:
        """Whether the parameters are elsewhere than the last update should have left them.

        Only the component along the momentum is compared: it must be off by a hundredth of the
        way, and by more than rounding. In other directions rounding hides more. A sum of n
        parameters of size a with signs may change by n a eps, because a program may round each of
        them differently, while an update of size u changes it by sqrt(n) u. In bfloat16, 10^4
        parameters of 0.1 hide updates of 0.08.
        """
        adapted: AdaptationState = state.adaptation
        along, dtype = leaves_by_path(state.momentum), adapted.position.dtype
        at = _at(params, along)
        length, size = (dot(x, x, dtype) for x in (along, at))
        eps = max([float(jnp.finfo(x.dtype).eps) for x in at.values()], default=0.0)
        off = jnp.abs(dot(at, along, dtype) - adapted.position)
        return off > 0.01 * jnp.abs(adapted.travelled) + 16 * eps * jnp.sqrt(size * length)

    def advance(
        self,
        state: AdaptedState,
        params: ArrayTree,
        gradient: ArrayTree,
        steps: ArrayTree,
        numbers: Numbers,
        damping: ArrayLike,
        loss: BatchLoss,
        *,
        factor_damping: ArrayLike,
        upcoming: ArrayLike | None,
        num_updates: Int[Array, ""],
        is_made: Bool[Array, ""],
    ) -> tuple[ArrayTree, ArrayTree, AdaptationState]:
        """Compute the update, the new momentum, and the adapted numbers.

        Args:
            state: State of ``kfac``, before the update.
            params: The parameters before the update.
            gradient: From :meth:`gradient_of`.
            steps: The preconditioned gradient.
            numbers: The numbers that the model does not choose.
            damping: From :meth:`damping_of`.
            loss: Loss of the batch.
            factor_damping: Damping of the factors at this update.
            upcoming: Damping of the next update, if it is given.
            num_updates: Updates so far, including this one.
            is_made: Whether there is an update to make.
        """
        before: AdaptationState = state.adaptation
        dtype, last = before.damping.dtype, leaves_by_path(state.momentum)
        moving = _at(params, last)
        ours, down = _at(gradient, last), _at(steps, last)
        model = QuadraticModel(ours, loss.curvature, jnp.asarray(damping, dtype))
        if self.by_model:
            update, least = self._least(model, down, last, numbers)
            velocity, decay, used = update, numbers.decay, least

            def change() -> Scalar:
                return least.change

        else:
            velocity, decay, used = advance_momentum(numbers.momentum, last, down), 0.0, numbers
            update = descend(velocity, ours, moving, numbers.rate, numbers.decay)

            def change() -> Scalar:
                second, first = model.along(update)
                return first[0] + second[0, 0] / 2

        displaced = self._displaced(state, params)
        after = {path: x.astype(dtype) for path, x in _moved(moving, update).items()}
        position, travelled = dot(after, velocity, dtype), dot(update, velocity, dtype)
        stands, new = self._tried(before, params, update, change, loss, decay, num_updates, is_made)
        # XLA updates parameters and momentum in place only after everything that reads them. So
        # the remaining reads are forced to come first, through a test that is never true.
        read = position + travelled + displaced.astype(dtype)
        stands &= ~(jnp.isnan(read) & (read > 0))
        if self.rule is None:  # a copy, because the state may be donated
            new = new._replace(damping=jnp.array(upcoming, dtype))
        new = new._replace(
            learning_rate=jnp.where(stands, jnp.asarray(used.rate, dtype), new.learning_rate),
            momentum=jnp.where(stands, jnp.asarray(used.momentum, dtype), new.momentum),
            position=jnp.where(stands, position, new.position),
            travelled=jnp.where(stands, travelled, new.travelled),
            factor_damping=self._following(
                jnp.asarray(factor_damping, dtype), before, new, numbers.decay
            ),
            displaced=new.displaced + displaced.astype(jnp.int32),
        )
        update = where(stands, update, jax.tree.map(jnp.zeros_like, update))
        if self.guarded:  # the next step begins without the momentum that led uphill
            dropped = new.rejected > before.rejected
            last = where(dropped, jax.tree.map(jnp.zeros_like, last), last)
            new = new._replace(
                position=jnp.where(dropped, 0, new.position),
                travelled=jnp.where(dropped, 0, new.travelled),
            )
        return (
            with_leaves(gradient, {p: x.astype(ours[p].dtype) for p, x in update.items()}),
            with_leaves(state.momentum, where(stands, velocity, last)),
            new,
        )

    def _following(
        self,
        factor_damping: Scalar,
        before: AdaptationState,
        new: AdaptationState,
        decay: ArrayLike,
    ) -> Scalar:
        """The factors' damping after a trial of the model's; their ratio changes only by a trial.

        At equal steps this was better than a factor damping that waits for its own trial, on 10 of
        the 12 problems of ``benchmarks/optimizers``, seed 0; the other two lost less than 1 %.
        """
        if not self.two_dampings:
            return factor_damping
        assert self.rule is not None
        old = before.damping + decay
        # With a minimum of 0 the damping may become 0, which has no ratio.
        ratio = jnp.where(old > 0, (new.damping + decay) / jnp.where(old > 0, old, 1), 1)
        return jnp.maximum(factor_damping * ratio, self.rule.minimum)

    def _least(
        self, model: QuadraticModel, steps: Leaves, last: Leaves, numbers: Numbers
    ) -> tuple[Leaves, Minimum]:
        """The update that minimizes the model over the step and the last update."""
        least = self._minimum(model, steps, last, numbers)
        update = {
            path: scaled(-least.rate, x.astype(old.dtype)) + scaled(least.momentum, old)
            for (path, x), old in zip(steps.items(), last.values(), strict=True)
        }
        return update, least

    def _minimum(
        self, model: QuadraticModel, steps: Leaves, last: Leaves, numbers: Numbers
    ) -> Minimum:
        """Coefficients that minimize the model over the step and the last update."""
        dtype = model.damping.dtype
        rate, momentum = (
            None if number is None else jnp.asarray(number, dtype)
            for number in (numbers.rate, numbers.momentum)
        )
        # A momentum fixed at 0 needs no product with the last update.
        alone = isinstance(numbers.momentum, float | int) and numbers.momentum == 0
        second, first = model.along(*((steps,) if alone else (steps, last)))
        # The step goes downhill: its sign is applied to coefficients, not to a tree.
        signs = jnp.asarray([-1, 1][: len(first)], dtype)
        bound = 1.0 if self.guarded else math.inf
        curved = signs[:, None] * second * signs
        return minimum(curved, signs * first, rate, momentum, bound=bound)

    def _tried(
        self,
        state: AdaptationState,
        params: ArrayTree,
        update: Leaves,
        change: Callable[[], Scalar],
        loss: BatchLoss,
        decay: ArrayLike,
        num_updates: Int[Array, ""],
        is_made: Bool[Array, ""],
    ) -> tuple[Bool[Array, ""], AdaptationState]:
        """Whether the update is made after all, and the state after a trial, if one is due.

        ``change()`` is the model's change, and ``decay`` the weight decay in the model.
        """
        dtype, at = state.damping.dtype, _at(params, update)
        if self.rule is None:
            due = is_made & (num_updates % _EVERY == 0)
        else:
            due = is_made & self.rule.is_due(state.damping, state.first_damping, num_updates)

        def trial() -> tuple[Scalar, Scalar]:
            moved_value = loss.value_fn(with_leaves(params, _moved(at, update)))
            scalar("value_fn", moved_value, "a function that returns the loss alone, one number")
            actual = jnp.asarray(moved_value, dtype) - jnp.asarray(loss.value, dtype)
            if may_be_positive(decay):
                decayed = dot(at, update, dtype) + dot(update, update, dtype) / 2
                actual += jnp.asarray(decay, dtype) * decayed
            return actual, change()

        def no_trial() -> tuple[Scalar, Scalar]:
            return jnp.zeros((), dtype), jnp.zeros((), dtype)

        tried = is_made if self.guarded else due
        actual, predicted = jax.lax.cond(tried, fast_convolutions(trial), no_trial)
        fine = jnp.isfinite(actual) & jnp.isfinite(predicted) & all_finite(update)
        rounding = _rounding(loss.value, at, dtype)
        negligible, rises = jnp.abs(predicted) <= rounding, actual > rounding
        if self.guarded:
            fine &= ~rises
        flat = predicted == 0
        ratio = jnp.where(flat, 1, actual / jnp.where(flat, 1, predicted))
        damping = state.damping
        if self.rule is not None:
            rejected = is_made & ~fine
            damping = self.rule.adapted(
                damping,
                ratio,
                predicted,
                due=due,
                rejected=rejected,
                negligible=negligible,
                first=state.first_damping,
            )
        disagrees = is_made & negligible & rises & jnp.isfinite(actual)
        return is_made & fine, state._replace(
            damping=damping,
            ratio=jnp.where(due & fine, ratio, state.ratio),
            rejected=state.rejected + (is_made & ~fine).astype(jnp.int32),
            disagreed=state.disagreed + (disagrees & ~fine).astype(jnp.int32),
        )


def _rounding(value: ArrayLike, params: Leaves, dtype: DTypeLike) -> Scalar:
    """The size of a change of the loss that its rounding explains."""
    kinds = [x.dtype for x in params.values()] + [jnp.asarray(value).dtype]
    eps = max(float(jnp.finfo(x).eps) for x in kinds if jnp.issubdtype(x, jnp.floating))
    return 8 * eps * jnp.abs(jnp.asarray(value, dtype))


def as_operator(curvature: object) -> Any:
    """Build the operator of a ``BatchCurvature``; return any other operator unchanged."""
    if not isinstance(curvature, BatchCurvature):
        return curvature
    problem = curvature.loss, curvature.params, curvature.batch
    return ggn(*problem, key=curvature.key, state=curvature.state, axis_name=curvature.axes)


def check_batch(curvature: object, terms: Any, left_out: ArrayLike = 0) -> None:
    """Refuse curvature of another batch than the gradient's, if both counts are concrete.

    Args:
        curvature: An operator.
        terms: Loss terms of the gradient's batch, or ``None``.
        left_out: Micro-batches left out so far; the operator may include their terms.

    Raises:
        ValueError: the operator's batch has a different number of terms.
    """
    theirs: Any = getattr(curvature, "loss_terms", None) if is_concrete(terms) else None
    if not is_concrete(theirs):
        return
    # Python numbers, because lax.cond would trace the comparison of concrete arrays.
    theirs, terms = float(theirs), float(terms)
    # Sums of weights are no whole numbers, and round otherwise for micro-batches than for a batch.
    if not (theirs.is_integer() and terms.is_integer()) and math.isclose(
        theirs, terms, rel_tol=1e-5
    ):
        return
    if terms > 0 and (theirs < terms or (theirs > terms and not left_out)):
        raise ValueError(
            f"curvature: the operator comes from a batch of {theirs:g} loss terms, and the "
            f"gradient from {terms:g}: build it from the same batch; under jk.multi_steps from "
            f"the whole "
            f"group, like value= and value_fn="
        )


def _at(tree: ArrayTree, paths: Leaves) -> Leaves:
    by_path = leaves_by_path(tree)
    return {path: by_path[path] for path in paths}


def _moved(params: Leaves, update: Leaves) -> Leaves:
    """The parameters after an update, in their dtypes."""
    return {path: x + update[path].astype(x.dtype) for path, x in params.items()}
