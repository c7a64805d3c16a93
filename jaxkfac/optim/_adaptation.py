"""Learning rate, momentum and damping that the quadratic model of the loss chooses."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxkfac._errors import instance_of, scalar
from jaxkfac.curvature.operators import Operator, ggn
from jaxkfac.factors import BatchCurvature
from jaxkfac.interception import (
    check_function,
    fast_convolutions,
    leaves_by_path,
    with_leaves,
)
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
    is_concrete,
    scaled,
    sharded_like,
    sum_dtype,
    where,
    whole,
)

PyTree = Any
Scalar = Float[Array, ""]
_EVERY = 5  # updates from one trial to the next where the damping is given


class AdaptationState(NamedTuple):
    r"""What :func:`jaxkfac.kfac` adapts, and how the last trial went.

    Numbers are in float32, or in float64 where a parameter is.

    Attributes:
        damping: $\lambda$ of the next update; where ``optax.inject_hyperparams`` gives it, of the
            last.
        ratio: $\rho$ of the last trial, the loss's actual change over the model's. 1 before the
            first, and where the model predicts no change.
        factor_damping: $\gamma^2$, by which the factors are damped, weight decay included; that of
            the model where there is none of its own.
        learning_rate: Of the last update.
        momentum: Of the last update.
        rejected: Updates not made because the model or the trial was not finite, int32.
        burned_in: Updates that averaged the factors alone, int32.
        displaced: Updates that did not find the parameters where the last one should have left
            them, int32: something after ``kfac`` changes its updates. Seen along what is kept as
            momentum alone, so that what is orthogonal to it, or a small part of it, is not.
        position: Inner product of what is kept as momentum with the parameters after the last
            update.
        travelled: And with that update: how far it went in that direction.
    """

    damping: Scalar
    ratio: Scalar
    factor_damping: Scalar
    learning_rate: Scalar
    momentum: Scalar
    rejected: Int[Array, ""]
    burned_in: Int[Array, ""]
    displaced: Int[Array, ""]
    position: Scalar
    travelled: Scalar


class BatchLoss(NamedTuple):
    """The loss of an update's batch: at the parameters, as a function of them, its curvature."""

    value: Any
    value_fn: Callable[[PyTree], Any]
    curvature: Operator

    def of_whole(self, params: PyTree) -> "BatchLoss":
        """The same of parameters that are whole on every device, where ``params`` are sharded."""
        return BatchLoss(
            whole(self.value),
            lambda moved: whole(self.value_fn(sharded_like(moved, params))),
            GatheredOperator(self.curvature, params),
        )


class Numbers(NamedTuple):
    """Those of an update; what the model chooses is ``None``."""

    rate: Any
    momentum: Any
    decay: Any


@dataclasses.dataclass(frozen=True)
class Adaptation:
    """Which of the three are adapted, and how.

    Attributes:
        rate: Whether the model chooses the learning rate.
        momentum: Whether the model chooses the momentum.
        rule: That of the damping, or ``None`` where it is given.
    """

    rate: bool
    momentum: bool
    rule: LevenbergMarquardt | None

    @staticmethod
    def of(
        learning_rate: Any, momentum: Any, damping: Any, norm_constraint: Any
    ) -> "Adaptation | None":
        """What the arguments of ``kfac`` ask for; ``None`` if all three are given.

        Raises:
            ValueError: another word than ``"quadratic"``, or what does not go with it.
        """
        for name, given in (("learning_rate", learning_rate), ("momentum", momentum)):
            if isinstance(given, str) and given != "quadratic":
                raise ValueError(f'{name}={given!r}: expected a number or "quadratic"')
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
        """Whether the model holds the weight decay, and the last update is kept as momentum."""
        return self.rate or self.momentum

    @property
    def burn_in(self) -> int:
        """Updates that average the factors alone."""
        return 0 if self.rule is None else self.rule.burn_in

    @property
    def two_dampings(self) -> bool:
        """Whether the factors have a damping of their own."""
        return self.by_model and self.rule is not None and self.rule.factor_every > 0

    def initial(self, params: PyTree, damping: Any, decay: Any) -> AdaptationState:
        """Before the first update; ``decay`` is the weight decay."""
        dtype = sum_dtype(params)

        def number(value: Any) -> Scalar:  # a buffer for each: a state may be donated
            return jnp.array(value, dtype)

        def count() -> Int[Array, ""]:
            return jnp.zeros((), jnp.int32)

        return AdaptationState(
            damping=number(damping),
            ratio=number(1),
            factor_damping=number(damping + (decay if self.by_model else 0.0)),
            learning_rate=number(0),
            momentum=number(0),
            rejected=count(),
            burned_in=count(),
            displaced=count(),
            position=number(0),
            travelled=number(0),
        )

    def loss(self, params: PyTree, value: Any, value_fn: Any, curvature: Any) -> BatchLoss:
        """The loss of a batch.

        Raises:
            TypeError: an argument of another type.
            ValueError: one that is missing.
        """
        given = {"params": params, "value": value, "value_fn": value_fn, "curvature": curvature}
        absent = [name for name, x in given.items() if x is None]
        if absent:
            raise ValueError(
                f"a kfac that adapts itself needs {' and '.join(absent)}: tx.update(grads, state, "
                "params, factors=factors, **stats.adaptation(params, batch, key)); or give "
                "jk.kfac a learning rate, which then needs none of them"
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

    def check(self, state: Any, params: PyTree, terms: Any, loss: BatchLoss) -> None:
        """Refuse what can be seen to be wrong where values are known: outside of ``jit``.

        Args:
            state: Of ``kfac``.
            params: That the update is of.
            terms: Loss terms of the gradient's batch, or ``None``.
            loss: Of the batch.

        Raises:
            ValueError: the curvature is of another batch, or the parameters are not where the
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

    def given(self, rate: Any, momentum: Any, decay: Any) -> Numbers:
        """The numbers of an update, without those that the model chooses."""
        rate, momentum = None if self.rate else rate, None if self.momentum else momentum
        return Numbers(rate, momentum, decay)

    def damping_of(self, state: Any, given: Any, decay: Any) -> Any:
        r"""$\lambda$ of an update, and $w$ with it where the model holds the weight decay."""
        damping = given if self.rule is None else state.adaptation.damping
        return damping + decay if self.by_model else damping

    def factor_damping_of(self, state: Any, damping: Any) -> Any:
        """What the factors are damped by, beside the model's ``damping``, before any trial."""
        return state.adaptation.factor_damping if self.two_dampings else damping

    def is_trial_due(self, step: Any, refresh_every: Any) -> Any:
        """Whether the factors' damping is tried at an update, if that is one with a refresh."""
        assert self.rule is not None
        periods = jnp.maximum(1, jnp.round(self.rule.factor_every / jnp.asarray(refresh_every)))
        return (step % (refresh_every * periods.astype(jnp.int32)) == 0) & (step > 0)

    def tried_factor_damping(
        self,
        state: Any,
        gradient: PyTree,
        direction: Callable[[Scalar], PyTree],
        damping: Any,
        loss: BatchLoss,
        numbers: Numbers,
        *,
        due: Any,
    ) -> Scalar:
        """The factors' damping after a trial, where one is due.

        Args:
            state: Of ``kfac``.
            gradient: As :meth:`gradient_of` makes it.
            direction: From a damping of the factors to the preconditioned gradient, like it.
            damping: As :meth:`damping_of` makes it.
            loss: Of the batch.
            numbers: Those that are given.
            due: Whether there is a trial.
        """
        assert self.rule is not None
        held: AdaptationState = state.adaptation
        dampings = self.rule.factor_dampings(held.factor_damping)
        dtype, last = held.damping.dtype, leaves_by_path(state.momentum)

        def change(factor_damping: Scalar) -> Scalar:
            steps = _at(direction(factor_damping), last)
            model = QuadraticModel(_at(gradient, last), loss.curvature, jnp.asarray(damping, dtype))
            return self._minimum(model, steps, last, numbers).change

        def trial() -> Scalar:
            # One after the other in a loop, which compiles one of them.
            changes = jax.lax.map(change, dampings)
            return dampings[jnp.argmin(jnp.where(jnp.isfinite(changes), changes, jnp.inf))]

        return jax.lax.cond(due, fast_convolutions(trial), lambda: held.factor_damping)

    def gradient_of(self, grads: PyTree, params: PyTree, moving: PyTree, decay: Any) -> PyTree:
        """The gradient of what the model is of: with that of the weight decay where it holds it."""
        if not (self.by_model and may_be_positive(decay)):
            return grads
        leaves = leaves_by_path(grads)
        at = _at(params, leaves_by_path(moving))
        decayed = {
            path: leaves[path] + scaled(decay, x.astype(leaves[path].dtype))
            for path, x in at.items()
        }
        return with_leaves(grads, decayed)

    def _displaced(self, state: Any, params: PyTree) -> Bool[Array, ""]:
        """Whether the parameters are elsewhere than the last update should have left them.

        Seen along the momentum alone: by a hundredth of the way, and more than rounding. In other
        directions rounding hides more: a sum of n parameters of size a with signs may change by
        n a eps, since a program may round each of them otherwise, and an update of size u
        of each changes it by sqrt(n) u. In bfloat16, 10^4 parameters of 0.1 hide updates of 0.08.
        """
        found: AdaptationState = state.adaptation
        along, dtype = leaves_by_path(state.momentum), found.position.dtype
        at = _at(params, along)
        length, size = (dot(x, x, dtype) for x in (along, at))
        eps = max([float(jnp.finfo(x.dtype).eps) for x in at.values()], default=0.0)
        off = jnp.abs(dot(at, along, dtype) - found.position)
        return off > 0.01 * jnp.abs(found.travelled) + 16 * eps * jnp.sqrt(size * length)

    def advance(
        self,
        state: Any,
        params: PyTree,
        gradient: PyTree,
        steps: PyTree,
        numbers: Numbers,
        damping: Any,
        loss: BatchLoss,
        *,
        factor_damping: Any,
        upcoming: Any,
        taken: Int[Array, ""],
        made: Bool[Array, ""],
    ) -> tuple[PyTree, PyTree, AdaptationState]:
        """The update, what is kept as momentum, and what was adapted.

        Args:
            state: Of ``kfac``, before the update.
            params: Before the update.
            gradient: As :meth:`gradient_of` makes it.
            steps: The same, preconditioned.
            numbers: Those that are given.
            damping: As :meth:`damping_of` makes it.
            loss: Of the batch.
            factor_damping: That of the update's factors.
            upcoming: The damping of the next update, where it is given.
            taken: Updates so far, with this one.
            made: Whether there is an update to make.
        """
        before: AdaptationState = state.adaptation
        dtype, last = before.damping.dtype, leaves_by_path(state.momentum)
        moving = _at(params, last)
        ours, down = _at(gradient, last), _at(steps, last)
        model = QuadraticModel(ours, loss.curvature, jnp.asarray(damping, dtype))
        if self.by_model:
            update, found = self._least(model, down, last, numbers)
            kept, decay, used = update, numbers.decay, found

            def change() -> Scalar:
                return found.change

        else:
            kept, decay, used = advance_momentum(numbers.momentum, last, down), 0.0, numbers
            update = descend(kept, ours, moving, numbers.rate, numbers.decay)

            def change() -> Scalar:
                second, first = model.along(update)
                return first[0] + second[0, 0] / 2

        displaced = self._displaced(state, params)
        after = {path: x.astype(dtype) for path, x in _moved(moving, update).items()}
        position, travelled = dot(after, kept, dtype), dot(update, kept, dtype)
        stands, new = self._tried(before, params, update, change, loss, decay, taken, made)
        # XLA writes the parameters and the momentum in place only after all that reads them, so
        # what else is read of them goes before, by what no number is.
        read = position + travelled + displaced.astype(dtype)
        stands &= ~(jnp.isnan(read) & (read > 0))
        if self.rule is None:  # a copy: the state may be donated
            new = new._replace(damping=jnp.array(upcoming, dtype))
        new = new._replace(
            learning_rate=jnp.where(stands, jnp.asarray(used.rate, dtype), new.learning_rate),
            momentum=jnp.where(stands, jnp.asarray(used.momentum, dtype), new.momentum),
            position=jnp.where(stands, position, new.position),
            travelled=jnp.where(stands, travelled, new.travelled),
            factor_damping=jnp.asarray(factor_damping, dtype),
            displaced=new.displaced + displaced.astype(jnp.int32),
        )
        update = where(stands, update, jax.tree.map(jnp.zeros_like, update))
        return (
            with_leaves(gradient, {p: x.astype(ours[p].dtype) for p, x in update.items()}),
            with_leaves(state.momentum, where(stands, kept, last)),
            new,
        )

    def _least(
        self, model: QuadraticModel, steps: Leaves, last: Leaves, numbers: Numbers
    ) -> tuple[Leaves, Minimum]:
        """The update where the model is least, over the step and the last update."""
        found = self._minimum(model, steps, last, numbers)
        update = {
            path: scaled(-found.rate, x.astype(old.dtype)) + scaled(found.momentum, old)
            for (path, x), old in zip(steps.items(), last.values(), strict=True)
        }
        return update, found

    def _minimum(
        self, model: QuadraticModel, steps: Leaves, last: Leaves, numbers: Numbers
    ) -> Minimum:
        """Where the model is least over the step and the last update."""
        dtype = model.damping.dtype
        rate, momentum = (
            None if number is None else jnp.asarray(number, dtype)
            for number in (numbers.rate, numbers.momentum)
        )
        alone = isinstance(numbers.momentum, float | int) and numbers.momentum == 0
        second, first = model.along(*((steps,) if alone else (steps, last)))
        # The step is taken downwards: by its sign in numbers, not in a tree.
        signs = jnp.asarray([-1, 1][: len(first)], dtype)
        return minimum(signs[:, None] * second * signs, signs * first, rate, momentum)

    def _tried(
        self,
        state: AdaptationState,
        params: PyTree,
        update: Leaves,
        change: Callable[[], Scalar],
        loss: BatchLoss,
        decay: Any,
        taken: Int[Array, ""],
        made: Bool[Array, ""],
    ) -> tuple[Bool[Array, ""], AdaptationState]:
        """Whether the update is made after all, and the state with what a trial says, where due.

        ``change()`` is the model's, and ``decay`` that which the model holds.
        """
        dtype, at = state.damping.dtype, _at(params, update)
        due = made & (taken % (_EVERY if self.rule is None else self.rule.every) == 0)

        def trial() -> tuple[Scalar, Scalar]:
            there = loss.value_fn(with_leaves(params, _moved(at, update)))
            scalar("value_fn", there, "a function that returns the loss alone, one number")
            actual = jnp.asarray(there, dtype) - jnp.asarray(loss.value, dtype)
            if may_be_positive(decay):
                decayed = dot(at, update, dtype) + dot(update, update, dtype) / 2
                actual += jnp.asarray(decay, dtype) * decayed
            return actual, change()

        def no_trial() -> tuple[Scalar, Scalar]:
            return jnp.zeros((), dtype), jnp.zeros((), dtype)

        actual, predicted = jax.lax.cond(due, fast_convolutions(trial), no_trial)
        fine = jnp.isfinite(actual) & jnp.isfinite(predicted) & all_finite(update)
        flat = predicted == 0
        ratio = jnp.where(flat, 1, actual / jnp.where(flat, 1, predicted))
        damping = state.damping
        if self.rule is not None:
            rejected = made & ~fine
            damping = self.rule.adapted(damping, ratio, predicted, tried=due, rejected=rejected)
        return made & fine, state._replace(
            damping=damping,
            ratio=jnp.where(due & fine, ratio, state.ratio),
            rejected=state.rejected + (made & ~fine).astype(jnp.int32),
        )


def as_operator(curvature: Any) -> Any:
    """The operator that ``stats.adaptation`` asks for; another one as it is."""
    if not isinstance(curvature, BatchCurvature):
        return curvature
    parts = curvature.loss, curvature.params, curvature.batch
    return ggn(*parts, key=curvature.key, state=curvature.state)


def check_batch(curvature: Any, terms: Any, left_out: Any = 0) -> None:
    """Refuse curvature of another batch than the gradient's, where both are known.

    Args:
        curvature: An operator.
        terms: Loss terms of the gradient's batch, or ``None``.
        left_out: Micro-batches that were left out so far: the operator may have their terms too.

    Raises:
        ValueError: the operator's batch has another number of them.
    """
    found: Any = getattr(curvature, "loss_terms", None) if is_concrete(terms) else None
    if not is_concrete(found):
        return
    # Numbers of Python's: of an array with values, lax.cond traces the comparison.
    found, terms = float(found), float(terms)
    if terms > 0 and (found < terms or (found > terms and not left_out)):
        raise ValueError(
            f"curvature: the operator is of a batch of {found:g} loss terms, and the gradient is "
            f"of {terms:g}: build it of the same batch; under jk.multi_steps, as value= and "
            "value_fn=, of the whole group's"
        )


def _at(tree: PyTree, paths: Leaves) -> Leaves:
    found = leaves_by_path(tree)
    return {path: found[path] for path in paths}


def _moved(params: Leaves, update: Leaves) -> Leaves:
    """The parameters after an update, in their dtypes."""
    return {path: x + update[path].astype(x.dtype) for path, x in params.items()}
