"""Learning rate, momentum and damping that the quadratic model of the loss or a rule chooses."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxkfac._arguments import ArrayTree, leaves_by_path, with_leaves
from jaxkfac._errors import scalar
from jaxkfac.blocks import Factors
from jaxkfac.flax import serializable
from jaxkfac.interception import fast_convolutions
from jaxkfac.optim._damping_rules import DampingRule, GivenDamping, Trial, Upcoming
from jaxkfac.optim._quadratic_model import (
    BatchLoss,
    Leaves,
    Minimum,
    QuadraticModel,
    check_batch,
    dot,
    minimum,
)
from jaxkfac.optim._schedules import may_be_positive
from jaxkfac.optim._trees import (
    advance_momentum,
    all_finite,
    descend,
    is_concrete,
    once_where,
    scaled,
    sum_dtype,
    where,
)

Scalar = Float[Array, ""]


@serializable
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdaptationState:
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
        rule: The damping rule's own state; ``None`` if it has none.
    """

    damping: Any
    ratio: Any
    factor_damping: Any
    learning_rate: Any
    momentum: Any
    first_damping: Any
    rejected: Any
    disagreed: Any
    burned_in: Any
    displaced: Any
    position: Any
    travelled: Any
    rule: Any = None

    def _replace(self, **changes: Any) -> "AdaptationState":
        """As of the NamedTuple that it was before there were rules with a state."""
        return dataclasses.replace(self, **changes)

    def _asdict(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @property
    def of_rule(self) -> tuple[Any, ...]:
        """What a rule decides, which an update that is not made leaves as it was."""
        return self.damping, self.first_damping, self.factor_damping, self.rule


@runtime_checkable
class AdaptedState(Protocol):
    """What the adaptation reads in the state of ``kfac``."""

    @property
    def momentum(self) -> ArrayTree: ...
    @property
    def adaptation(self) -> Any: ...


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
        rule: The rule of the damping.
    """

    rate: bool
    momentum: bool
    rule: DampingRule

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
        if isinstance(damping, str | type):
            raise TypeError(
                f'damping={damping!r}: expected "auto", a number, a schedule, a pair of them, or '
                "jk.LevenbergMarquardt() to adapt it"
            )
        rule = damping if isinstance(damping, DampingRule) else GivenDamping(damping)
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
        return out if out.by_model or not isinstance(rule, GivenDamping) else None

    @property
    def by_model(self) -> bool:
        """Whether the model includes the weight decay, and momentum is the last update."""
        return self.rate or self.momentum

    @property
    def reads_curvature(self) -> bool:
        """Whether an update needs the curvature of its batch."""
        return self.by_model or self.reads_loss

    @property
    def reads_loss(self) -> bool:
        """Whether an update needs the loss as a value and as a function."""
        return self.rule.reads_loss or self.rule.safeguard

    @property
    def two_dampings(self) -> bool:
        """Whether the factors have a damping of their own."""
        return self.by_model and self.rule.factor_every > 0

    def initial(self, params: ArrayTree, decay: ArrayLike) -> AdaptationState:
        """The state before the first update; ``decay`` is the weight decay."""
        dtype, (damping, of_rule) = sum_dtype(params), self.rule.begin(params)

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
            rule=jax.tree.map(jnp.array, of_rule),
        )

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
        factors: Factors | None,
        value: Any,
        loss: BatchLoss | None,
        decay: ArrayLike,
    ) -> tuple[Any, Any, Any]:
        r"""The state of ``kfac`` after :meth:`DampingRule.before`, and the dampings of an update.

        Args:
            state: State of ``kfac``.
            gradient: From :meth:`gradient_of`.
            factors: Factors of the update.
            value: Loss of the batch, or ``None``.
            loss: Loss of the batch, if it is read.
            decay: The weight decay.

        Returns:
            The state; the damping of the model, which is $\lambda$, plus $w$ if the model includes
            the weight decay; and the damping of the factors before any trial.
        """
        adapted: AdaptationState = state.adaptation
        dtype, slope = adapted.damping.dtype, _at(gradient, leaves_by_path(state.momentum))

        def curvature() -> Scalar:
            assert loss is not None
            model = QuadraticModel(slope, loss.curvature, jnp.zeros((), dtype))
            second, first = model.along(slope)
            return second[0, 0] / first[0]

        known = None if loss is None else curvature
        upcoming = Upcoming(state.step, slope, factors, value, known)
        damping, of_rule = self.rule.before(adapted.damping, adapted.rule, upcoming)
        # Added before the sum is rounded to the state's dtype, because a given damping is a number.
        of_model, is_first = damping + decay if self.by_model else damping, state.step == 0
        damping = jnp.asarray(damping, dtype)
        adapted = adapted._replace(
            damping=damping,
            first_damping=jnp.where(is_first, damping, adapted.first_damping),
            factor_damping=jnp.where(is_first, of_model, adapted.factor_damping).astype(dtype),
            rule=of_rule,
        )
        of_factors = adapted.factor_damping if self.two_dampings else of_model
        return state._replace(adaptation=adapted), of_model, of_factors

    def numbers_of(self, rate: ArrayLike, momentum: ArrayLike, decay: ArrayLike) -> Numbers:
        """The numbers of an update, except those that the model chooses."""
        return Numbers(None if self.rate else rate, None if self.momentum else momentum, decay)

    def is_trial_due(self, step: ArrayLike, refresh_every: ArrayLike) -> Any:
        """Whether the factors' damping is tried at an update, provided that it refreshes."""
        periods = jnp.maximum(1, jnp.round(self.rule.factor_every / jnp.asarray(refresh_every)))
        return (step % (refresh_every * periods.astype(jnp.int32)) == 0) & (step > 0)

    def best_direction(
        self,
        state: AdaptedState,
        gradient: ArrayTree,
        direction: Callable[[Scalar, ArrayTree], tuple[ArrayTree, ArrayTree]],
        carry: ArrayTree,
        damping: ArrayLike,
        loss: BatchLoss,
        numbers: Numbers,
        *,
        due: Bool[Array, ""],
    ) -> tuple[ArrayTree, Scalar, Minimum]:
        """The direction with the factors' damping, which a trial chooses if one is due.

        Every candidate takes one pass, the current damping the last; if another is better, its
        pass is made once more, so that all passes write over the same arrays. Without a trial
        there is one pass.

        Args:
            state: State of ``kfac``.
            gradient: From :meth:`gradient_of`.
            direction: Maps a damping of the factors, and the carry, to the new carry and the
                preconditioned gradient.
            carry: Bases and steps, over which those of each pass are written.
            damping: The damping of the model, from :meth:`begun`.
            loss: Loss of the batch.
            numbers: The numbers that the model does not choose.
            due: Whether there is a trial.

        Returns:
            The carry after the last pass, its damping of the factors, and the minimum of the model.
        """
        current = state.adaptation.factor_damping
        dtype, last = current.dtype, leaves_by_path(state.momentum)
        candidates = jnp.roll(self.rule.factor_dampings(current), -1)  # the current one is the last
        final = len(candidates)

        def one_pass(passed: Any) -> Any:
            carry, _, (best, least_change, best_at), i = passed
            used = jnp.where(due & (i < final), candidates[i], jnp.where(due, best, current))
            carry, steps = direction(used, carry)
            model = QuadraticModel(_at(gradient, last), loss.curvature, jnp.asarray(damping, dtype))
            least = self._minimum(model, _at(steps, last), last, numbers)
            change = jnp.where(jnp.isfinite(least.change), least.change, jnp.inf)
            is_better = (change < least_change) | ((change == least_change) & (i == final - 1))
            best = where(is_better, (used, change, i), (best, least_change, best_at))
            return carry, (used, least), best, i

        def step(passed: Any, i: Array) -> tuple[Any, None]:
            *others, _ = passed
            _, _, best_at = passed[2]
            active = (i == 0) | (due & ((i < final) | (best_at != final - 1)))
            return once_where(active, fast_convolutions(one_pass), (*others, i)), None

        zero, first = jnp.zeros((), dtype), jnp.zeros((), jnp.int32)
        worst = current, jnp.full((), jnp.inf, dtype), first
        passed = carry, (current, Minimum(zero, zero, zero)), worst, first
        (carry, (used, least), *_), _ = jax.lax.scan(
            step, passed, jnp.arange(final + 1, dtype=jnp.int32)
        )
        return carry, used, least

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
        params: ArrayTree | None,
        gradient: ArrayTree,
        steps: ArrayTree,
        numbers: Numbers,
        damping: ArrayLike,
        loss: BatchLoss | None,
        *,
        factor_damping: ArrayLike,
        least: Minimum | None,
        num_updates: Int[Array, ""],
        is_made: Bool[Array, ""],
    ) -> tuple[ArrayTree, ArrayTree, AdaptationState]:
        """Compute the update, the new momentum, and the adapted numbers.

        Args:
            state: State of ``kfac``, from :meth:`begun`.
            params: The parameters before the update.
            gradient: From :meth:`gradient_of`.
            steps: The preconditioned gradient.
            numbers: The numbers that the model does not choose.
            damping: The damping of the model, from :meth:`begun`.
            loss: Loss of the batch, if it is read.
            factor_damping: Damping of the factors at this update.
            least: From :meth:`best_direction`, if the factors have a damping of their own.
            num_updates: Updates so far, including this one.
            is_made: Whether there is an update to make.
        """
        before: AdaptationState = state.adaptation
        dtype, last = before.damping.dtype, leaves_by_path(state.momentum)
        moving = {} if params is None else _at(params, last)
        ours, down = _at(gradient, last), _at(steps, last)
        factor_damping = jnp.asarray(factor_damping, dtype)
        if loss is None:
            velocity = advance_momentum(numbers.momentum, last, down)
            update = descend(velocity, ours, moving, numbers.rate, numbers.decay)
            trial = _untried(before, num_updates)
            stands, new, used = is_made, self._after(before, trial), numbers
        else:
            model = QuadraticModel(ours, loss.curvature, jnp.asarray(damping, dtype))
            if self.by_model:
                if least is None:
                    least = self._minimum(model, down, last, numbers)
                update = {
                    path: scaled(-least.rate, x.astype(old.dtype)) + scaled(least.momentum, old)
                    for (path, x), old in zip(down.items(), last.values(), strict=True)
                }
                velocity, decay, used = update, numbers.decay, least

                predicted = least.change

                def change() -> Scalar:
                    return predicted

            else:
                velocity, decay, used = advance_momentum(numbers.momentum, last, down), 0.0, numbers
                update = descend(velocity, ours, moving, numbers.rate, numbers.decay)

                def change() -> Scalar:
                    second, first = model.along(update)
                    return first[0] + second[0, 0] / 2

            displaced = self._displaced(state, params)
            after = {path: x.astype(dtype) for path, x in _moved(moving, update).items()}
            position, travelled = dot(after, velocity, dtype), dot(update, velocity, dtype)
            stands, new = self._tried(
                before, params, update, change, loss, decay, num_updates, is_made
            )
            # XLA updates parameters and momentum in place only after everything that reads them. So
            # the remaining reads are forced to come first, through a test that is never true.
            read = position + travelled + displaced.astype(dtype)
            stands &= ~(jnp.isnan(read) & (read > 0))
            new = new._replace(
                position=jnp.where(stands, position, new.position),
                travelled=jnp.where(stands, travelled, new.travelled),
                displaced=new.displaced + displaced.astype(jnp.int32),
            )
        new = new._replace(
            learning_rate=jnp.where(stands, jnp.asarray(used.rate, dtype), new.learning_rate),
            momentum=jnp.where(stands, jnp.asarray(used.momentum, dtype), new.momentum),
            factor_damping=self._following(factor_damping, before, new, numbers.decay),
        )
        update = where(stands, update, jax.tree.map(jnp.zeros_like, update))
        if self.rule.safeguard:  # the next step begins without the momentum that led uphill
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

    def kept(
        self,
        new: AdaptationState,
        old: AdaptationState,
        *,
        is_made: Bool[Array, ""],
        burned: Bool[Array, ""],
    ) -> AdaptationState:
        """The state after an update; what the rule decided is dropped if the update is not made."""
        damping, first, of_factors, rule = where(is_made, new.of_rule, old.of_rule)
        new = new._replace(
            damping=damping, first_damping=first, factor_damping=of_factors, rule=rule
        )
        return _counting(new, burned_in=burned)

    def _after(self, state: AdaptationState, trial: Trial) -> AdaptationState:
        """The state after :meth:`DampingRule.after`."""
        damping, of_rule = self.rule.after(state.damping, state.rule, trial)
        return state._replace(damping=jnp.asarray(damping, state.damping.dtype), rule=of_rule)

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
        old = before.damping + decay
        # With a minimum of 0 the damping may become 0, which has no ratio.
        ratio = jnp.where(old > 0, (new.damping + decay) / jnp.where(old > 0, old, 1), 1)
        return jnp.maximum(factor_damping * ratio, self.rule.minimum)

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
        bound = 1.0 if self.rule.safeguard else math.inf
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
        dtype, at, value_fn = state.damping.dtype, _at(params, update), loss.value_fn
        trial, fine = _untried(state, num_updates), all_finite(update)
        if loss.value is None or value_fn is None:
            new = self._after(state, trial._replace(rejected=is_made & ~fine))
            return is_made & fine, _counting(new, rejected=is_made & ~fine)
        due = is_made & self.rule.is_due(state.damping, state.first_damping, num_updates)

        def tried() -> tuple[Scalar, Scalar]:
            moved_value = value_fn(with_leaves(params, _moved(at, update)))
            scalar("value_fn", moved_value, "a function that returns the loss alone, one number")
            actual = jnp.asarray(moved_value, dtype) - jnp.asarray(loss.value, dtype)
            if may_be_positive(decay):
                decayed = dot(at, update, dtype) + dot(update, update, dtype) / 2
                actual += jnp.asarray(decay, dtype) * decayed
            return actual, change()

        def untried() -> tuple[Scalar, Scalar]:
            return jnp.zeros((), dtype), jnp.zeros((), dtype)

        evaluated = is_made if self.rule.safeguard else due
        actual, predicted = jax.lax.cond(evaluated, fast_convolutions(tried), untried)
        fine = jnp.isfinite(actual) & jnp.isfinite(predicted) & fine
        rounding = _rounding(loss.value, at, dtype)
        negligible, rises = jnp.abs(predicted) <= rounding, actual > rounding
        if self.rule.safeguard:
            fine &= ~rises
        flat = predicted == 0
        ratio = jnp.where(flat, 1, actual / jnp.where(flat, 1, predicted))
        rejected = is_made & ~fine
        new = self._after(
            state,
            trial._replace(
                due=due, ratio=ratio, change=predicted, rejected=rejected, negligible=negligible
            ),
        )
        disagrees = is_made & negligible & rises & jnp.isfinite(actual)
        new = new._replace(ratio=jnp.where(due & fine, ratio, state.ratio))
        return is_made & fine, _counting(new, rejected=rejected, disagreed=disagrees & ~fine)


def _untried(state: AdaptationState, num_updates: Int[Array, ""]) -> Trial:
    """What a rule sees of an update whose loss is not evaluated."""
    no, numbers = jnp.zeros((), bool), (jnp.ones_like(state.ratio), jnp.zeros_like(state.ratio))
    return Trial(num_updates, state.first_damping, no, *numbers, rejected=no, negligible=no)


def _counting(state: AdaptationState, **events: Bool[Array, ""]) -> AdaptationState:
    """The state with each counter raised by one where its event has occurred."""
    return state._replace(
        **{name: getattr(state, name) + x.astype(jnp.int32) for name, x in events.items()}
    )


def _rounding(value: ArrayLike, params: Leaves, dtype: DTypeLike) -> Scalar:
    """The size of a change of the loss that its rounding explains."""
    kinds = [x.dtype for x in params.values()] + [jnp.asarray(value).dtype]
    eps = max(float(jnp.finfo(x).eps) for x in kinds if jnp.issubdtype(x, jnp.floating))
    return 8 * eps * jnp.abs(jnp.asarray(value, dtype))


def _at(tree: ArrayTree, paths: Leaves) -> Leaves:
    by_path = leaves_by_path(tree)
    return {path: by_path[path] for path in paths}


def _moved(params: Leaves, update: Leaves) -> Leaves:
    """The parameters after an update, in their dtypes."""
    return {path: x + update[path].astype(x.dtype) for path, x in params.items()}
