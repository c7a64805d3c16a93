"""One update of K-FAC by the paper's steps: average, refresh, precondition, constrain, descend."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array

from jaxkfac._arguments import ArrayTree
from jaxkfac.blocks import Factors
from jaxkfac.curvature import Eigenbases, MeshAxis
from jaxkfac.curvature.operators import Operator
from jaxkfac.factors import BatchCurvature
from jaxkfac.interception import Staged, TraceCache
from jaxkfac.linalg.spectral import Damping
from jaxkfac.optim._adaptation import Adaptation, AdaptationState, BatchLoss, Numbers
from jaxkfac.optim._curvature import Curvature, Others
from jaxkfac.optim._kfac_state import (
    KfacState,
    check_same_model,
    state_sharded_like,
    warn_of_growth,
)
from jaxkfac.optim._mapped_update import Arguments, MappedAxes
from jaxkfac.optim._schedules import (
    at_step,
    has_schedule,
    may_be_positive,
)
from jaxkfac.optim._trees import (
    advance_momentum,
    all_finite,
    cast_like,
    check_like_momentum,
    check_some_covered,
    check_state,
    checked_value,
    descend,
    gathered,
    gradients_only,
    is_sharded,
    norm_scale,
    on_mesh_of,
    once_where,
    required_factors,
    scale_covered,
    sharded_like,
    sum_dtype,
    where,
    with_constants,
    zero_momentum,
    zero_unless,
)
from jaxkfac.optim._watch import StateWatch, check_factors_have_come, is_in_range, warn_if_diverged


@dataclasses.dataclass(frozen=True, eq=False)
class KfacTransformation:
    """The parts of an update, in the order of the paper.

    Attributes:
        curvature: Averages the factors, refreshes bases or inverses, and preconditions.
        others: Transforms the parameters that no factor covers.
        adaptation: Chooses rate, momentum and damping, or some of them, by the quadratic model.
        rate: Number or schedule; 0 if the model chooses it.
        damping: Number, schedule or a pair of these; the first damping if a rule adapts it.
        momentum: Number; 0 if the model chooses it.
        norm_constraint: Bound on a step, or ``None``.
        weight_decay: Number.
        distribute: Mesh axis over which decompositions are divided, or ``None``.
        mapped: Mapped axes over which an update reduces what it gets.
    """

    curvature: Curvature
    others: Others
    adaptation: Adaptation | None
    rate: Any
    damping: Any
    momentum: Any
    norm_constraint: ArrayLike | None
    weight_decay: ArrayLike
    distribute: str | None
    mapped: MappedAxes
    staged: TraceCache[Staged] = dataclasses.field(default_factory=TraceCache)

    def init(self, params: ArrayTree) -> KfacState:
        """The state before the first update."""
        curvature, adaptation, covered = self.curvature, self.adaptation, self.curvature.covered
        check_some_covered("params", params, covered, "like=")
        first = jnp.zeros((), jnp.int32)
        delta = at_step(self.damping, first)
        average, bases = curvature.initial(delta)
        state = KfacState(
            step=first,
            stacked_average=average,
            stacked_bases=bases,
            momentum=zero_momentum(params, covered, everywhere=self.others.tx is None),
            others=self.others.init(params),
            skipped=jnp.zeros((), jnp.int32),
            kept=jnp.zeros((), jnp.int32),
            missed=jnp.zeros((), jnp.int32),
            stacks=curvature.stacks,
            watch=StateWatch.initial(params),
            adaptation=()
            if adaptation is None
            else adaptation.initial(params, delta, self.weight_decay),
        )
        return on_mesh_of(params, state)

    def update(
        self,
        updates: ArrayTree,
        state: Any,
        params: ArrayTree | None = None,
        *,
        value: ArrayLike | None = None,
        value_fn: Callable[[ArrayTree], ArrayLike] | None = None,
        curvature: Operator | BatchCurvature | None = None,
        **extra: Any,
    ) -> tuple[ArrayTree, KfacState]:
        """Check the arguments, then advance; outside ``jit`` by a cached trace."""
        ours = self.curvature
        if params is None and may_be_positive(self.weight_decay):
            raise ValueError("weight_decay needs the parameters: tx.update(grads, state, params)")
        # optax calls both inputs and outputs updates
        given = Arguments(updates, params, required_factors("kfac", extra))
        given = self.mapped.reduced(
            given._replace(value=value, value_fn=value_fn, curvature=curvature)
        )
        grads, _, factors, value, value_fn, curvature = given
        at_some_steps = isinstance(factors, Factors) and factors.loss_terms is not None
        if factors is not None:
            factors = ours.checked(factors)
        check_state("kfac", state, KfacState)
        check_same_model(
            state,
            ours.stacks,
            ours.method.stored_type,
            adapts=self.adaptation is not None,
            like=ours.like,
        )
        if factors is not None:
            factors = ours.as_kept(factors, state)
        if at_some_steps:
            check_factors_have_come(state.missed, state.stacked_average, factors)
        check_like_momentum(grads, state.momentum)
        if params is not None:
            check_some_covered("params", params, ours.covered, "like=")
        loss = None
        if self.adaptation is not None:
            loss = self.adaptation.loss(params, value, value_fn, curvature)
            terms = None if factors is None else factors.terms
            self.adaptation.check(state, params, terms, loss)
        extra |= self.others.extra(value=value, value_fn=value_fn)
        axis = None
        if self.distribute is not None:
            axis = MeshAxis.of(self.distribute, params, grads, state)
        numbers = tuple(
            at_step(x, state.step) if has_schedule(x) else None for x in (self.rate, self.damping)
        )
        numbers += (None if value is None else jnp.asarray(checked_value(value)),)
        call: tuple[Any, ...] = (grads, state, params, factors, numbers, extra)
        # A schedule may return a Python number, and ``extra`` may hold functions.
        leaves = jax.tree.leaves(call)
        traced = any(isinstance(x, Tracer) for x in leaves)
        if traced and factors is not None:
            warn_of_growth(state, factors, stacklevel=3)
        if ours.method.on_host:
            call += (self._from_host(traced, grads, state, factors),)
        step = functools.partial(self._advance_gathered, axis=axis, loss=loss)
        # Outside jit a later call only runs equations, because a new lax.cond compiles its
        # branches. Schedules are read at every call, and what `others` reads is not known.
        ready = not traced and all(isinstance(x, jax.Array) for x in leaves)
        if self.others.tx is None and loss is None and ready:
            step = self.staged.get(call, lambda: Staged.of(step, *call), static=axis)
        out, new = step(*call)
        warn_if_diverged(new, stacklevel=3)
        return out, new

    def _advance_gathered(
        self,
        grads: ArrayTree,
        state: KfacState,
        params: ArrayTree | None,
        *more: Any,
        axis: MeshAxis | None,
        loss: BatchLoss | None,
    ) -> Any:
        inputs = (grads, state, params, *more)
        if not is_sharded(inputs):
            return self.advance(*inputs, axis=axis, loss=loss)
        loss = None if loss is None else loss.of_whole(params)
        out, new = self.advance(*cast(Any, gathered(inputs)), axis=axis, loss=loss)
        return sharded_like(out, grads), state_sharded_like(new, state)

    def _is_burning(self, state: KfacState) -> Any:
        """Whether this update belongs to the burn-in; ``None`` if there is no burn-in."""
        if self.adaptation is None or not self.adaptation.burn_in:
            return None
        return cast(AdaptationState, state.adaptation).burned_in < self.adaptation.burn_in

    def _from_host(
        self, traced: bool, grads: ArrayTree, state: KfacState, factors: Factors | None
    ) -> Eigenbases | None:
        """New bases if they are due and the step is not going to be skipped."""
        if traced:
            raise ValueError(
                "inverse='host' decomposes outside of jit, and this update is traced: call "
                "tx.update outside of jit, scan and jk.multi_steps, or build with inverse='eigh'"
            )
        if self._is_burning(state) or not is_in_range(factors):
            return None
        if factors is not None and factors.turn is not None and not factors.turn.is_valid:
            return None
        if not all_finite(gradients_only(grads), factors):
            return None
        return self.curvature.from_host(state, factors)

    def advance(
        self,
        grads: ArrayTree,
        state: KfacState,
        params: ArrayTree | None,
        factors: Factors | None,
        numbers: tuple[Any, ...],
        extra: dict[str, Any],
        from_host: Eigenbases | None = None,
        *,
        axis: MeshAxis | None,
        loss: BatchLoss | None,
    ) -> tuple[ArrayTree, KfacState]:
        """One update: average, refresh, precondition, constrain; skip or step; then descend."""
        update = self._prepared(grads, state, params, factors, numbers, loss)
        average, restarted, skipped = self._averaged(update)
        update = update._replace(
            burning=_either(update.burning, self.curvature.is_filling(average))
        )
        # Selects may read it: its inputs are in a loop, so that XLA cannot copy them into each.
        done = skipped == state.skipped
        moves = done if update.burning is None else done & ~update.burning
        step = functools.partial(self._step, update, average, extra, from_host, axis)
        results = once_where(moves, step, self._unmoved(update))
        steps = self.curvature.stacks.unstacked_tree(results.steps, update.gradient)
        if results.scale is not None:
            steps = scale_covered(results.scale, steps, self.curvature.covered)
        watch, missed = self._watch(update, average, restarted, results.num_updates, done)
        descent = self._descend(update, results, steps, done)
        out = self.others.joined(descent.covered, descent.others_update)
        out = zero_unless(moves, out)
        return with_constants(grads, out), KfacState(
            step=results.num_updates,
            stacked_average=average,
            stacked_bases=results.bases,
            momentum=descent.velocity,
            others=descent.others_state,
            skipped=skipped,
            kept=results.num_failed,
            missed=state.missed + missed.astype(jnp.int32),
            stacks=self.curvature.stacks,
            watch=watch,
            adaptation=descent.adaptation,
        )

    def _prepared(
        self,
        grads: ArrayTree,
        state: KfacState,
        params: ArrayTree | None,
        factors: Factors | None,
        numbers: tuple[Any, ...],
        loss: BatchLoss | None,
    ) -> "_Update":
        """The numbers, gradient and factors of this update, and whether they are finite."""
        gradient, configured, value = gradients_only(grads), (self.rate, self.damping), numbers[-1]
        now = zip(configured, numbers[:-1], strict=True)
        rate, delta = (x if at is None else at for x, at in now)
        gamma, fixed_numbers, adaptation = delta, Numbers(None, None, None), self.adaptation
        if adaptation is not None:
            gradient = adaptation.gradient_of(gradient, params, state.momentum, self.weight_decay)
            if loss is not None:
                state = adaptation.begun(state, gradient, loss, state.step, self.weight_decay)
            delta = adaptation.damping_of(state, delta, self.weight_decay)
            gamma = adaptation.factor_damping_of(state, delta)
            fixed_numbers = adaptation.numbers_of(rate, self.momentum, self.weight_decay)
        # Stacked before the cond, which then has few operands.
        stacked, new = self.curvature.stacks.tree(gradient), self.curvature.stacked(factors)
        finite, burning = all_finite(stacked, new), self._is_burning(state)
        in_range, one_group = is_in_range(new), jnp.asarray(True)
        if new is not None and new.turn is not None:
            one_group = new.turn.is_valid
        return _Update(
            grads=grads,
            state=state,
            params=params,
            gradient=gradient,
            stacked=stacked,
            factors=new,
            rate=rate,
            damping=delta,
            factor_damping=gamma,
            fixed_numbers=fixed_numbers,
            value=value,
            loss=loss,
            outsized=finite & ~in_range,
            burning=burning,
            sound=finite & in_range & one_group,
        )

    def _averaged(self, update: "_Update") -> tuple[Factors, Array, Array]:
        """The average, the number of averages that restarted, and of updates skipped so far."""
        state, new = update.state, update.factors
        skipped = jnp.asarray(optax.safe_increment(state.skipped))

        def averaged(carry: tuple[Factors, Array, Array]) -> tuple[Factors, Array, Array]:
            return *self.curvature.averaged(carry[0], new), state.skipped

        unchanged = state.stacked_average, jnp.zeros((), jnp.int32), skipped
        return once_where(update.sound, averaged, unchanged)

    def _step(
        self,
        update: "_Update",
        average: Factors,
        extra: dict[str, Any],
        from_host: Eigenbases | None,
        axis: MeshAxis | None,
        unmoved: "_Results",
    ) -> "_Results":
        """Refresh, precondition and constrain, and the step of ``others``."""
        # What changes in place is read from the argument: a second reader would need a copy.
        gradient, state = unmoved.steps, update.state._replace(stacked_bases=unmoved.bases)
        curvature, new, damping = self.curvature, update.factors, update.factor_damping
        refreshed = functools.partial(
            curvature.refreshed, state, average, new, axis=axis, from_host=from_host
        )
        # Bases do not depend on the damping, so a trial of dampings can already use new ones.
        early_refresh = None if curvature.method.damps_at_refresh else refreshed(damping)
        if self.adaptation is not None and self.adaptation.two_dampings and update.loss is not None:
            early_bases = None if early_refresh is None else early_refresh[0]
            update = update._replace(state=state, stacked=gradient)
            damping = self._tried_factor_damping(update, average, early_bases)
        bases, num_failed = refreshed(damping) if early_refresh is None else early_refresh
        steps, scale = curvature.method.apply(gradient, bases, damping), None
        if self.norm_constraint is not None:
            paths = curvature.stacked_paths
            scale = norm_scale(steps, gradient, paths, update.rate, self.norm_constraint)
        others_update, others_state = (), state.others
        if self.others.tx is not None:
            others_update, others_state = self.others.tx.update(
                update.grads, state.others, update.params, **extra
            )
            others_update = cast_like(update.grads, others_update)
        return _Results(
            steps=steps,
            scale=scale,
            bases=bases,
            others_update=others_update,
            others_state=others_state,
            factor_damping=damping,
            num_updates=jnp.asarray(optax.safe_increment(state.step)),
            num_failed=state.kept + num_failed,
        )

    def _tried_factor_damping(
        self, update: "_Update", average: Factors, early_bases: Any | None
    ) -> Any:
        """The factors' damping, chosen by the model among its neighbors when a trial is due."""
        adaptation, curvature, state = self.adaptation, self.curvature, update.state
        assert adaptation is not None and update.loss is not None

        def direction(damping: Damping) -> ArrayTree:
            bases = curvature.fresh(state, average, damping) if early_bases is None else early_bases
            steps = curvature.method.apply(update.stacked, bases, damping)
            return curvature.stacks.unstacked_tree(steps, update.gradient)

        due = adaptation.is_trial_due(state.step, curvature.refresh_every)
        due &= curvature.refresh.is_due(state) & (average.terms > 0)
        configured = update.loss, update.fixed_numbers
        return adaptation.tried_factor_damping(
            state, update.gradient, direction, update.damping, *configured, due=due
        )

    def _unmoved(self, update: "_Update") -> "_Results":
        """The results of an update that is skipped, or belongs to the burn-in."""
        # In place of steps stand the gradients, over which the steps are written.
        state, scale = update.state, None
        if self.norm_constraint is not None:
            scale = update.sound.astype(sum_dtype(update.stacked))
        others_update = (
            () if self.others.tx is None else jax.tree.map(jnp.zeros_like, update.gradient)
        )
        return _Results(
            steps=update.stacked,
            scale=scale,
            bases=self.curvature.unchanged(state, update.factors),
            others_update=others_update,
            others_state=state.others,
            factor_damping=update.factor_damping,
            num_updates=state.step,
            num_failed=state.kept,
        )

    def _watch(
        self,
        update: "_Update",
        average: Factors,
        restarted: Array,
        num_updates: Array,
        done: Array,
    ) -> tuple[StateWatch, Any]:
        """What the state counts of this update, and whether its refresh had no factors."""
        state, new, refresh = update.state, update.factors, self.curvature.refresh
        came = jnp.asarray(False) if new is None else done & (new.terms > 0)
        due = done & refresh.is_due(state)
        watch = state.watch.after(update.value, came=came, due=due, begun=average.terms > 0)
        watch = watch.counting(outsized=update.outsized, restarted=restarted)
        missed = (num_updates != state.step) & refresh.is_missed(state, average)
        return watch, missed

    def _descend(
        self, update: "_Update", results: "_Results", steps: ArrayTree, done: Array
    ) -> "_Descent":
        """Momentum, rate and weight decay; those that the model chooses, with its adaptation."""
        state, adaptation, burning = update.state, self.adaptation, update.burning
        others_update, others_state = results.others_update, results.others_state
        if update.loss is None or adaptation is None:
            made = done if burning is None else done & ~burning
            velocity = advance_momentum(self.momentum, state.momentum, steps)
            velocity = where(made, velocity, state.momentum)
            out = descend(velocity, update.gradient, update.params, update.rate, self.weight_decay)
            return _Descent(out, velocity, others_update, others_state, ())
        out, velocity, adapted = adaptation.advance(
            state,
            update.params,
            update.gradient,
            steps,
            update.fixed_numbers,
            update.damping,
            update.loss,
            factor_damping=results.factor_damping,
            upcoming=at_step(self.damping, results.num_updates),
            num_updates=results.num_updates,
            is_made=done if burning is None else done & ~burning,
        )
        burned = jnp.zeros_like(done) if burning is None else done & burning
        adapted = adapted._replace(burned_in=adapted.burned_in + burned.astype(jnp.int32))
        # A step that the model rejects is not made for the other parameters either.
        stands = adapted.rejected == cast(AdaptationState, state.adaptation).rejected
        others_update, others_state = where(
            stands,
            (others_update, others_state),
            (jax.tree.map(jnp.zeros_like, others_update), state.others),
        )
        return _Descent(out, velocity, others_update, others_state, adapted)


def _either(one: ArrayLike | None, other: ArrayLike | None) -> ArrayLike | None:
    """Whether one of two holds, either of which may be ``None``."""
    return other if one is None else one if other is None else one | other


class _Update(NamedTuple):
    """The inputs of an update, stacked where layers are, and whether it can be made.

    Attributes:
        grads: The gradients as passed, constants among them.
        state: The state before.
        params: The parameters, if given.
        gradient: The gradient of the parameters that have one; where the model adapts, of the
            penalized loss.
        stacked: The gradient of the stacked model.
        factors: Those of the stacked model, if any came.
        rate: The learning rate at this step.
        damping: The damping at this step, which the model may have adapted.
        factor_damping: The damping of the factors; equal to ``damping`` unless two are adapted.
        fixed_numbers: Rate, momentum and weight decay that the model does not choose.
        value: The loss of the batch, if given.
        loss: The batch's loss as a function and its curvature, where the model adapts.
        outsized: Whether gradient and factors are finite, and factors are out of range.
        burning: Whether the update belongs to the burn-in, or to the first turns, which only
            average factors; ``None`` without either.
        sound: Whether they are finite, in range and of one group, so that the update is made.
    """

    grads: ArrayTree
    state: KfacState
    params: ArrayTree | None
    gradient: ArrayTree
    stacked: dict[str, Array]
    factors: Factors | None
    rate: Any
    damping: Any
    factor_damping: Any
    fixed_numbers: Numbers
    value: Array | None
    loss: BatchLoss | None
    outsized: Array
    burning: Any
    sound: Array


class _Results(NamedTuple):
    """What an update changes, in one structure whether it is made or not.

    Attributes:
        steps: Preconditioned gradients of the stacked model, not yet constrained.
        scale: The norm constraint's factor, or ``None`` without one.
        bases: Bases or inverses.
        others_update: The update of ``others``, or ``()``.
        others_state: The state of ``others``.
        factor_damping: The damping that ``steps`` were made with.
        num_updates: Updates so far.
        num_failed: Decompositions that failed so far.
    """

    steps: Any
    scale: Array | None
    bases: Any
    others_update: ArrayTree
    others_state: Any
    factor_damping: Any
    num_updates: Array
    num_failed: Array


class _Descent(NamedTuple):
    """Where an update leads: the steps of both kinds of parameters, and the states after them."""

    covered: ArrayTree
    velocity: ArrayTree
    others_update: ArrayTree
    others_state: Any
    adaptation: Any
