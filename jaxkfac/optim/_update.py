"""One update of an optimizer that takes factors: average, refresh, direction, descent."""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array

from jaxkfac._arguments import ArrayTree
from jaxkfac.blocks import Factors
from jaxkfac.curvature import Eigenbases, MeshAxis
from jaxkfac.interception import Staged, TraceCache
from jaxkfac.linalg.spectral import Damping
from jaxkfac.optim._curvature import Curvature, Others
from jaxkfac.optim._mapped_update import Arguments, MappedAxes
from jaxkfac.optim._quadratic_model import BatchLoss
from jaxkfac.optim._schedules import at_step, has_schedule, may_be_positive
from jaxkfac.optim._trees import (
    all_finite,
    cast_like,
    check_like_momentum,
    check_some_covered,
    checked_state,
    checked_value,
    gathered,
    is_sharded,
    on_mesh_of,
    once_where,
    required_factors,
    scale_covered,
    sharded_like,
    with_constants,
    zero_unless,
)
from jaxkfac.optim._watch import StateWatch, is_in_range, warn_if_diverged


class UpdateArguments(NamedTuple):
    """The arguments of an update, checked, and reduced over mapped axes.

    Attributes:
        grads: The gradients, constants among them.
        state: The state before.
        params: The parameters, if given.
        factors: The factors, if any came.
        schedules: Values of the schedules among :attr:`FactorOptimizer.numbers` at this step;
            ``None`` in the places of other numbers, which stay Python's.
        value: The loss of the batch, if given.
        extra: The arguments that ``others`` reads.
        from_host: New bases that the host has decomposed, if any.
    """

    grads: ArrayTree
    state: Any
    params: ArrayTree | None
    factors: Factors | None
    schedules: tuple[Any, ...]
    value: Array | None
    extra: dict[str, Any]
    from_host: Eigenbases | None = None


class Update(NamedTuple):
    """An update that has begun.

    Attributes:
        call: Its arguments.
        state: The state before, with what the optimizer decides before the update.
        gradient: The gradient of the parameters that have one; where the quadratic model includes
            the weight decay, of the penalized loss.
        stacked: The gradient of the stacked model.
        factors: What is averaged, of the stacked model, if anything came.
        numbers: What the optimizer alone knows of the update.
        loss: The batch's loss as a function and its curvature, where the optimizer reads them.
        num_updates: Updates so far, including this one.
        average: The average that the update decomposes.
        sound: Whether gradient and factors are finite, in range and of one group.
        outsized: Whether they are finite, and factors are out of range.
    """

    call: UpdateArguments
    state: Any
    gradient: ArrayTree
    stacked: dict[str, Array]
    factors: Factors | None
    numbers: Any
    loss: BatchLoss | None
    num_updates: Array
    average: Factors
    sound: Array
    outsized: Array


class Direction(NamedTuple):
    """Where an update goes, in one structure whether it is made or not.

    Attributes:
        steps: Preconditioned gradients of the stacked model; the gradients, over which these are
            written, if the update is not made.
        scale: A factor of the steps of covered parameters, or ``None`` without one.
        memory: What the optimizer alone changes with it.
    """

    steps: dict[str, Array]
    scale: Array | None
    memory: Any


class Moved(NamedTuple):
    """What an update changes before it descends.

    Attributes:
        direction: Where it goes.
        bases: Bases or inverses.
        others: The update of ``others`` and their state; ``()`` in place of an update without them.
        num_updates: Updates so far.
        num_failed: Decompositions that failed so far.
    """

    direction: Direction
    bases: Any
    others: tuple[ArrayTree, Any]
    num_updates: Array
    num_failed: Array


class Descent(NamedTuple):
    """Where an update leads.

    Attributes:
        updates: The update of the covered parameters, and of the rest without ``others``.
        others: The update of ``others`` and their state.
        fields: The fields of the state that the optimizer alone has.
    """

    updates: ArrayTree
    others: tuple[ArrayTree, Any]
    fields: dict[str, Any]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FactorOptimizer(abc.ABC):
    """The steps that :func:`kfac` and :func:`kfe_adam` share; each adds its direction and descent.

    Attributes:
        curvature: Averages the factors, and refreshes bases or inverses.
        others: Transforms the parameters that no factor covers.
        rate: Number or schedule.
        weight_decay: Number.
        mapped: Mapped axes over which an update reduces what it gets.
        distribute: Mesh axis over which decompositions are divided, or ``None``.
    """

    name: ClassVar[str]
    state_type: ClassVar[Any]

    curvature: Curvature
    others: Others
    rate: Any
    weight_decay: ArrayLike
    mapped: MappedAxes
    distribute: str | None = None
    staged: TraceCache[Staged] = dataclasses.field(default_factory=TraceCache)

    # ---------------- what each optimizer adds

    @property
    def incoming(self) -> Curvature:
        """The factors that come, and which of their layers are stacked."""
        return self.curvature

    @property
    def numbers(self) -> tuple[Any, ...]:
        """The numbers that may be schedules."""
        return (self.rate,)

    @property
    def averages_last(self) -> bool:
        """Whether the average takes an update's statistics after its step."""
        return False

    @property
    def reads_curvature(self) -> bool:
        """Whether an update needs the curvature of its batch."""
        return False

    @abc.abstractmethod
    def initial(self, params: ArrayTree) -> tuple[Damping, dict[str, Any]]:
        """The first damping, and the fields of the state that this optimizer alone has."""

    @abc.abstractmethod
    def momentum_of(self, state: Any) -> ArrayTree:
        """The tree of the state that has the parameters' form."""

    @abc.abstractmethod
    def check_model(self, state: Any) -> None:
        """Refuse the state of another model."""

    @abc.abstractmethod
    def begun(
        self, call: UpdateArguments, numbers: tuple[Any, ...], loss: BatchLoss | None
    ) -> tuple[ArrayTree, Any, Any]:
        """The gradient, the state, and what the optimizer alone knows of an update."""

    def statistics(self, stacked: dict[str, Array], factors: Factors | None) -> Factors | None:
        """What is averaged, from the gradient and the factors of the stacked model."""
        return factors

    @abc.abstractmethod
    def waits(self, update: Update) -> Any:
        """Whether an update only averages factors; ``None`` if none does."""

    @abc.abstractmethod
    def unmoved(self, update: Update) -> Direction:
        """The direction of an update that is not made."""

    @abc.abstractmethod
    def direction(
        self, update: Update, unmoved: Direction, refreshed: Callable[..., Any]
    ) -> tuple[Direction, Any]:
        """The direction of an update, and the bases and failures of ``refreshed(damping)``.

        ``refreshed(damping, bases=...)`` refreshes other bases than those of the state. What
        changes in place is read from ``unmoved``: a second reader would need a copy.
        """

    @abc.abstractmethod
    def descended(
        self, update: Update, moved: Moved, steps: ArrayTree, *, waits: Any, is_made: Array
    ) -> Descent:
        """The updates, from steps of the model that is not stacked."""

    # ---------------- the state and the arguments

    def init(self, params: ArrayTree) -> Any:
        """The state before the first update."""
        check_some_covered("params", params, self.incoming.covered, "like=")
        damping, fields = self.initial(params)
        average, bases = self.curvature.initial(damping)
        counts = {name: jnp.zeros((), jnp.int32) for name in ("step", "skipped", "kept", "missed")}
        state = self.state_type(
            stacked_average=average,
            stacked_bases=bases,
            others=self.others.init(params),
            stacks=self.incoming.stacks,
            watch=StateWatch.initial(params),
            **counts,
            **fields,
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
        curvature: Any = None,
        **extra: Any,
    ) -> tuple[ArrayTree, Any]:
        """Check the arguments, then advance; outside ``jit`` by a cached trace."""
        if params is None and may_be_positive(self.weight_decay):
            raise ValueError("weight_decay needs the parameters: tx.update(grads, state, params)")
        # optax calls both inputs and outputs updates
        factors = required_factors(self.name, extra)
        given = Arguments(updates, params, factors, value, value_fn)
        if self.reads_curvature:
            given = given._replace(curvature=curvature)
        given = self.mapped.reduced(given)
        grads, _, factors, value, value_fn, curvature = given
        if factors is not None:
            factors = self.incoming.checked(factors)
        state = checked_state(f"{self.name}: the state", state, self.state_type)
        self.check_model(state)
        factors = self.kept_factors(state, given.factors, factors)
        check_like_momentum(grads, self.momentum_of(state))
        if params is not None:
            check_some_covered("params", params, self.incoming.covered, "like=")
        loss = self.loss(state, given._replace(factors=factors))
        axis = None
        if self.distribute is not None:
            axis = MeshAxis.of(self.distribute, params, grads, state)
        call = UpdateArguments(
            grads=grads,
            state=state,
            params=params,
            factors=factors,
            schedules=tuple(
                at_step(x, state.step) if has_schedule(x) else None for x in self.numbers
            ),
            value=None if value is None else jnp.asarray(checked_value(value)),
            extra=extra | self.others.extra(value=value, value_fn=value_fn),
        )
        # A schedule may return a Python number, and ``extra`` may hold functions.
        leaves = jax.tree.leaves(call)
        traced = any(isinstance(x, Tracer) for x in leaves)
        call = call._replace(from_host=self.from_host(call, traced=traced))
        step = functools.partial(self._advance_gathered, axis=axis, loss=loss)
        # Outside jit a later call only runs equations, because a new lax.cond compiles its
        # branches. Schedules are read at every call, and what `others` reads is not known.
        ready = not traced and all(isinstance(x, jax.Array) for x in leaves)
        if self.others.tx is None and loss is None and ready:
            step = self.staged.get(call, lambda: Staged.of(step, call), static=axis)
        out, new = step(call)
        warn_if_diverged(new, stacklevel=3)
        return out, new

    def kept_factors(self, state: Any, passed: Any, factors: Factors | None) -> Factors | None:
        """The factors of an update, in the form that the state keeps."""
        return factors

    def loss(self, state: Any, given: Arguments) -> BatchLoss | None:
        """The loss of the batch, if this optimizer reads it."""
        return None

    def from_host(self, call: UpdateArguments, *, traced: bool) -> Eigenbases | None:
        """New bases that the host decomposes, if they are due."""
        return None

    def _advance_gathered(
        self, call: UpdateArguments, *, axis: MeshAxis | None, loss: BatchLoss | None
    ) -> tuple[ArrayTree, Any]:
        if not is_sharded(call):
            return self.advance(call, axis=axis, loss=loss)
        loss = None if loss is None else loss.of_whole(call.params)
        whole: Any = gathered(call)
        out, new = self.advance(whole, axis=axis, loss=loss)
        return sharded_like(out, call.grads), self.sharded_like(new, call.state)

    def sharded_like(self, new: Any, old: Any) -> Any:
        """Shard a new state like the old one."""
        return sharded_like(new, old)

    # ---------------- the update

    def advance(
        self, call: UpdateArguments, *, axis: MeshAxis | None, loss: BatchLoss | None
    ) -> tuple[ArrayTree, Any]:
        """One update: average, refresh, direction; skip or step; then descend."""
        update = self._prepared(call, loss)
        state, stacks = update.state, self.incoming.stacks
        if self.averages_last:
            done = update.sound
        else:
            average, restarted, skipped = self._averaged(update)
            # Selects may read it: its inputs are in a loop, so that XLA cannot copy them into each.
            update, done = update._replace(average=average), skipped == state.skipped
        waits = self.waits(update)
        moves = done if waits is None else done & ~waits
        step = functools.partial(self._moved, update, axis)
        moved = once_where(moves, step, self._unmoved(update))
        if self.averages_last:
            average, restarted, skipped = self._averaged(update)
        steps = stacks.unstacked_tree(moved.direction.steps, update.gradient)
        if moved.direction.scale is not None:
            steps = scale_covered(moved.direction.scale, steps, self.incoming.covered)
        watch, missed = self._watch(update, average, restarted, moved.num_updates, done)
        descent = self.descended(update, moved, steps, waits=waits, is_made=moves)
        others_update, others_state = descent.others
        out = zero_unless(moves, self.others.joined(descent.updates, others_update))
        return with_constants(call.grads, out), state._replace(
            step=moved.num_updates,
            stacked_average=average,
            stacked_bases=moved.bases,
            others=others_state,
            skipped=skipped,
            kept=moved.num_failed,
            missed=state.missed + missed.astype(jnp.int32),
            stacks=stacks,
            watch=watch,
            **descent.fields,
        )

    def _prepared(self, call: UpdateArguments, loss: BatchLoss | None) -> Update:
        """The gradient and factors of this update, and whether they are finite."""
        now = zip(self.numbers, call.schedules, strict=True)
        gradient, state, numbers = self.begun(
            call, tuple(x if at is None else at for x, at in now), loss
        )
        # Stacked before the loop, which then has few operands.
        stacked = self.incoming.stacks.tree(gradient)
        new = self.statistics(stacked, self.incoming.stacked(call.factors))
        finite, in_range = all_finite(stacked, new), is_in_range(new)
        sound = finite & in_range
        if new is not None and new.turn is not None:
            sound &= new.turn.is_valid
        return Update(
            call=call,
            state=state,
            gradient=gradient,
            stacked=stacked,
            factors=new,
            numbers=numbers,
            loss=loss,
            num_updates=jnp.asarray(optax.safe_increment(state.step)),
            average=state.stacked_average,
            sound=sound,
            outsized=finite & ~in_range,
        )

    def _averaged(self, update: Update) -> tuple[Factors, Array, Array]:
        """The average, the number of averages that restarted, and of updates skipped so far."""
        state, new = update.state, update.factors
        skipped = jnp.where(update.sound, state.skipped, optax.safe_increment(state.skipped))
        came = update.sound if new is None else update.sound & (new.terms > 0)

        def averaged(carry: tuple[Factors, Array, Array]) -> tuple[Factors, Array, Array]:
            return *self.curvature.averaged(carry[0], new), carry[2]

        return once_where(
            came, averaged, (state.stacked_average, jnp.zeros((), jnp.int32), skipped)
        )

    def _moved(self, update: Update, axis: MeshAxis | None, unmoved: Moved) -> Moved:
        """Refresh, the direction, and the step of ``others``."""
        state, call = update.state._replace(stacked_bases=unmoved.bases), update.call

        def refreshed(damping: Damping, bases: Any = state.stacked_bases) -> Any:
            before, how = state._replace(stacked_bases=bases), {"from_host": call.from_host}
            averages = update.average, update.factors
            return self.curvature.refreshed(before, *averages, damping, axis=axis, **how)

        update, others = update._replace(state=state), unmoved.others
        direction, (bases, num_failed) = self.direction(update, unmoved.direction, refreshed)
        if self.others.tx is not None:
            out, others_state = self.others.tx.update(
                call.grads, others[1], call.params, **call.extra
            )
            others = cast_like(call.grads, out), others_state
        return Moved(direction, bases, others, update.num_updates, state.kept + num_failed)

    def _unmoved(self, update: Update) -> Moved:
        """The results of an update that is skipped, or only averages factors."""
        state, out = update.state, ()
        if self.others.tx is not None:
            out = jax.tree.map(jnp.zeros_like, update.gradient)
        bases = self.curvature.unchanged(state, update.factors)
        return Moved(self.unmoved(update), bases, (out, state.others), state.step, state.kept)

    def _watch(
        self, update: Update, average: Factors, restarted: Array, num_updates: Array, done: Array
    ) -> tuple[StateWatch, Any]:
        """What the state counts of this update, and whether its refresh had no factors."""
        state, new, refresh = update.state, update.factors, self.curvature.refresh
        came = jnp.asarray(False) if new is None else done & (new.terms > 0)
        is_made = num_updates != state.step
        due = is_made & refresh.is_due(state)
        watch = state.watch.after(update.call.value, came=came, due=due, begun=average.terms > 0)
        watch = watch.counting(outsized=update.outsized, restarted=restarted)
        return watch, is_made & refresh.is_missed(state, average)
