"""K-FAC's own part of an update: its direction, and descent by given numbers or by the model."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array

from jaxkfac._arguments import ArrayTree
from jaxkfac.blocks import Factors
from jaxkfac.curvature import Eigenbases
from jaxkfac.linalg.spectral import Damping
from jaxkfac.optim._adaptation import Adaptation, Numbers
from jaxkfac.optim._kfac_state import (
    KfacState,
    check_same_model,
    state_sharded_like,
    warn_of_growth,
)
from jaxkfac.optim._mapped_update import Arguments
from jaxkfac.optim._quadratic_model import BatchLoss, Minimum
from jaxkfac.optim._schedules import at_step
from jaxkfac.optim._trees import (
    advance_momentum,
    all_finite,
    descend,
    gradients_only,
    norm_scale,
    sum_dtype,
    where,
    zero_momentum,
)
from jaxkfac.optim._update import (
    Descent,
    Direction,
    FactorOptimizer,
    Moved,
    Update,
    UpdateArguments,
)
from jaxkfac.optim._watch import check_factors_have_come, is_in_range


class KfacNumbers(NamedTuple):
    """The numbers of an update of K-FAC.

    Attributes:
        rate: The learning rate; 0 if the model chooses it.
        damping: The damping of the quadratic model; without one, of the factors.
        factor_damping: The damping of the factors; equal to ``damping`` unless two are adapted.
        fixed: Rate, momentum and weight decay that the model does not choose.
    """

    rate: Any
    damping: Any
    factor_damping: Any
    fixed: Numbers


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class KfacTransformation(FactorOptimizer):
    """K-FAC: natural gradients, a norm constraint and momentum, or steps of the quadratic model.

    Attributes:
        adaptation: What chooses rate, momentum and damping, or some of them; ``None`` if all are
            given.
        damping: Number, schedule or a pair of these, if it is given.
        momentum: Number; 0 if the model chooses it.
        norm_constraint: Bound on a step, or ``None``.
    """

    name = "kfac"
    state_type = KfacState

    adaptation: Adaptation | None
    damping: Any
    momentum: Any
    norm_constraint: ArrayLike | None

    @property
    def numbers(self) -> tuple[Any, ...]:
        return (self.rate, self.damping) if self.adaptation is None else (self.rate,)

    @property
    def reads_curvature(self) -> bool:
        return self.adaptation is not None and self.adaptation.reads_curvature

    # ---------------- the state and the arguments

    def initial(self, params: ArrayTree) -> tuple[Damping, dict[str, Any]]:
        covered, everywhere = self.curvature.covered, self.others.tx is None
        momentum = zero_momentum(params, covered, everywhere=everywhere)
        if self.adaptation is None:
            return at_step(self.damping, jnp.zeros((), jnp.int32)), {"momentum": momentum}
        adapted = self.adaptation.initial(params, self.weight_decay)
        damping, _ = self.adaptation.rule.begin(params)
        return damping, {"momentum": momentum, "adaptation": adapted}

    def momentum_of(self, state: KfacState) -> ArrayTree:
        return state.momentum

    def check_model(self, state: KfacState) -> None:
        ours, adapts = self.curvature, self.adaptation is not None
        check_same_model(state, ours.stacks, ours.method.stored_type, adapts=adapts, like=ours.like)

    def kept_factors(
        self, state: KfacState, passed: Any, factors: Factors | None
    ) -> Factors | None:
        if factors is None:
            return None
        factors = self.curvature.as_kept(factors, state)
        if passed.loss_terms is not None:  # collected at some steps
            check_factors_have_come(state.missed, state.stacked_average, factors)
        return factors

    def loss(self, state: KfacState, given: Arguments) -> BatchLoss | None:
        if self.adaptation is None or not self.adaptation.reads_curvature:
            return None
        reads_loss = self.adaptation.reads_loss
        model = given.value, given.value_fn, given.curvature
        loss = BatchLoss.of(given.params, *model, reads_loss=reads_loss)
        terms = None if given.factors is None else given.factors.terms
        self.adaptation.check(state, given.params, terms, loss)
        return loss

    def from_host(self, call: UpdateArguments, *, traced: bool) -> Eigenbases | None:
        state, factors = call.state, call.factors
        if traced and factors is not None:
            warn_of_growth(state, factors, stacklevel=4)
        if not self.curvature.method.on_host:
            return None
        if traced:
            raise ValueError(
                "inverse='host' decomposes outside of jit, and this update is traced: call "
                "tx.update outside of jit, scan and jk.multi_steps, or build with inverse='eigh'"
            )
        # None if the step is going to be skipped.
        if self._is_burning(state) or not is_in_range(factors):
            return None
        if factors is not None and factors.turn is not None and not factors.turn.is_valid:
            return None
        if not all_finite(gradients_only(call.grads), factors):
            return None
        return self.curvature.from_host(state, factors)

    def sharded_like(self, new: KfacState, old: KfacState) -> KfacState:
        return state_sharded_like(new, old)

    # ---------------- the update

    def begun(
        self, call: UpdateArguments, numbers: tuple[Any, ...], loss: BatchLoss | None
    ) -> tuple[ArrayTree, KfacState, KfacNumbers]:
        gradient, adaptation, decay = gradients_only(call.grads), self.adaptation, self.weight_decay
        if adaptation is None:
            rate, damping = numbers
            fixed = Numbers(rate, self.momentum, decay)
            return gradient, call.state, KfacNumbers(rate, damping, damping, fixed)
        (rate,) = numbers
        gradient = adaptation.gradient_of(gradient, call.params, call.state.momentum, decay)
        batch = call.factors, call.value, loss
        state, damping, gamma = adaptation.begun(call.state, gradient, *batch, decay)
        fixed = adaptation.numbers_of(rate, self.momentum, decay)
        return gradient, state, KfacNumbers(rate, damping, gamma, fixed)

    def _is_burning(self, state: KfacState) -> Any:
        """Whether an update belongs to the burn-in; ``None`` if there is none."""
        if self.adaptation is None or not self.adaptation.rule.burn_in:
            return None
        adapted: Any = state.adaptation
        return adapted.burned_in < self.adaptation.rule.burn_in

    def waits(self, update: Update) -> Any:
        burns = self._is_burning(update.state)
        fills = self.curvature.is_filling(update.average)
        return fills if burns is None else burns if fills is None else burns | fills

    def unmoved(self, update: Update) -> Direction:
        scale, least = None, None
        if self.norm_constraint is not None:
            scale = update.sound.astype(sum_dtype(update.stacked))
        elif self._tries(update):
            zero = jnp.zeros_like(update.state.adaptation.damping)
            least = Minimum(zero, zero, zero)
        return Direction(update.stacked, scale, (update.numbers.factor_damping, least))

    def _tries(self, update: Update) -> bool:
        """Whether the factors have a damping of their own, which the model chooses."""
        return self.adaptation is not None and self.adaptation.two_dampings

    def direction(
        self, update: Update, unmoved: Direction, refreshed: Callable[..., Any]
    ) -> tuple[Direction, Any]:
        """Precondition and constrain; the memory is the damping that was used, and the minimum."""
        gradient, damping, scale = unmoved.steps, update.numbers.factor_damping, None
        if self._tries(update):
            gradient = update.stacked  # every pass of a trial reads it
            refresh, steps, damping, least = self._best_direction(update, unmoved, refreshed)
        else:
            refresh, least = refreshed(damping), None
            steps = self.curvature.method.apply(gradient, refresh[0], damping)
        if self.norm_constraint is not None:
            paths, rate = self.curvature.stacked_paths, update.numbers.rate
            scale = norm_scale(steps, gradient, paths, rate, self.norm_constraint)
            least = None  # it is the minimum along steps that are not constrained
        return Direction(steps, scale, (damping, least)), refresh

    def _best_direction(
        self, update: Update, unmoved: Direction, refreshed: Callable[..., Any]
    ) -> tuple[Any, Any, Any, Minimum]:
        """The direction whose factors' damping the model chooses when a trial is due."""
        curvature, state, numbers = self.curvature, update.state, update.numbers
        adaptation, loss = self.adaptation, update.loss
        assert adaptation is not None and loss is not None
        # Bases do not depend on the damping, so all passes of a trial use the new ones.
        renews = curvature.method.damps_at_refresh
        bases = state.stacked_bases, jnp.zeros((), jnp.int32)
        if not renews:
            bases = refreshed(numbers.factor_damping)

        def direction(damping: Damping, carry: Any) -> tuple[Any, ArrayTree]:
            bases, _ = carry
            if renews:
                bases = refreshed(damping, bases=bases[0])
            steps = curvature.method.apply(update.stacked, bases[0], damping)
            return (bases, steps), curvature.stacks.unstacked_tree(steps, update.gradient)

        due = adaptation.is_trial_due(state.step, curvature.periods.refresh_every)
        due &= curvature.refresh.is_due(state) & (update.average.terms > 0)
        (bases, steps), damping, least = adaptation.best_direction(
            state,
            update.gradient,
            direction,
            (bases, unmoved.steps),
            numbers.damping,
            loss,
            numbers.fixed,
            due=due,
        )
        return bases, steps, damping, least

    def descended(
        self, update: Update, moved: Moved, steps: ArrayTree, *, waits: Any, is_made: Array
    ) -> Descent:
        """Momentum, rate and weight decay; or those that the model chooses, with its adaptation."""
        state, params, adaptation = update.state, update.call.params, self.adaptation
        if adaptation is None:
            velocity = advance_momentum(self.momentum, state.momentum, steps)
            velocity = where(is_made, velocity, state.momentum)
            rate = update.numbers.rate
            out = descend(velocity, update.gradient, params, rate, self.weight_decay)
            return Descent(out, moved.others, {"momentum": velocity})
        factor_damping, least = moved.direction.memory
        out, velocity, adapted = adaptation.advance(
            state,
            params,
            update.gradient,
            steps,
            update.numbers.fixed,
            update.numbers.damping,
            update.loss,
            factor_damping=factor_damping,
            least=least,
            num_updates=update.num_updates,
            is_made=is_made,
        )
        # A step that the model rejects is not made for the other parameters either.
        stands = adapted.rejected == state.adaptation.rejected
        none = jax.tree.map(jnp.zeros_like, moved.others[0]), state.others
        burned = jnp.zeros_like(is_made) if waits is None else update.sound & waits
        adapted = adaptation.kept(
            adapted, update.call.state.adaptation, is_made=is_made, burned=burned
        )
        fields = {"momentum": velocity, "adaptation": adapted}
        return Descent(out, where(stands, moved.others, none), fields)
