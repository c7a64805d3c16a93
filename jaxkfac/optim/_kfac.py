"""K-FAC as an optax transformation that runs in one graph."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from jaxkfac.curvature import Eigenbases, MeshAxis
from jaxkfac.curvature.operators import Operator
from jaxkfac.factors import BatchCurvature, Factors
from jaxkfac.interception import Staged, TraceCache
from jaxkfac.linalg import Damping, DampingMode
from jaxkfac.optim._adaptation import Adaptation, AdaptationState, BatchLoss, Numbers
from jaxkfac.optim._curvature import Curvature, Others, shapes_of
from jaxkfac.optim._kfac_state import (
    KfacState,
    check_same_model,
    state_sharded_like,
    warn_of_growth,
)
from jaxkfac.optim._levenberg_marquardt import LevenbergMarquardt, initial_damping
from jaxkfac.optim._preconditioner import InverseMethod, preconditioner_of
from jaxkfac.optim._schedules import (
    Schedule,
    at_step,
    check_learning_rate,
    check_numbers,
    check_scheduled_damping,
    has_schedule,
    known_clipping,
    may_be_positive,
)
from jaxkfac.optim._stacks import Stacks
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
    is_concrete,
    is_sharded,
    norm_scale,
    on_mesh_of,
    required_factors,
    scale_covered,
    sharded_like,
    sum_dtype,
    taken_where,
    where,
    with_constants,
    zero_momentum,
)
from jaxkfac.optim._watch import StateWatch, check_factors_have_come, is_in_range, warn_if_diverged

PyTree = Any

# With rates of 0.03, 0.1 and 0.3 no recorded run (benchmarks/results/optimizers) ended above its
# first loss. With a damping of 1e-3 and no norm constraint, the perceptron does at a rate of 0.01
# (tests/first_hour_test.py).
SAFE_DAMPING, SAFE_NORM = 0.1, 1e-2


def kfac(
    learning_rate: ArrayLike | Schedule | Literal["quadratic"] = "quadratic",
    *,
    like: Factors,
    damping: Damping | Schedule | tuple[Any, Any] | LevenbergMarquardt | Literal["auto"] = "auto",
    damping_mode: DampingMode | Literal["auto"] = "auto",
    decay: ArrayLike = 0.95,
    refresh_every: ArrayLike = 10,
    momentum: ArrayLike | Literal["quadratic", "auto"] = "auto",
    norm_constraint: ArrayLike | Literal["auto"] | None = "auto",
    weight_decay: ArrayLike = 0.0,
    max_condition: ArrayLike = 1e6,
    floor: ArrayLike = 0.0,
    others: optax.GradientTransformation | None = None,
    inverse: InverseMethod = "auto",
    stagger: bool = False,
    distribute: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Kronecker-factored natural gradient descent with averages, refreshes and momentum.

    Without a learning rate it adapts itself: the quadratic model of the loss chooses rate and
    momentum, and dampings are adapted. It then needs ``**stats.adaptation(params, batch, key)`` at
    every update. With a learning rate it follows the fixed rule below. Its default damping and norm
    constraint are such that no recorded run of ``benchmarks.optimizers`` diverges at a rate of 0.1.

    With $\bar F$ the exponential average of the factors, decomposed every
    ``refresh_every`` steps, $\mu$ the momentum, $\eta$ the learning rate:

    $$ p = (\bar F + \delta)^{-1} \nabla, \qquad
       \nu = \min\Bigl(1, \sqrt{c / (\eta^2 \langle p, \nabla \rangle)}\Bigr), \qquad
       m \leftarrow \mu m + \nu p, \qquad
       \Delta = -\eta\,(m + w\,\theta) . $$

    $\nu$ is the norm constraint: $\langle p, \nabla\rangle = \langle p, (\bar F +
    \delta) p\rangle$ bounds $\langle p, F p\rangle$, twice the KL divergence of a step.

    Factors from ``stats(..., bases=state.bases)`` include eigenvalues measured in the current
    eigenvectors (EKFAC). Their average since the last refresh then replaces
    $\lambda_A \lambda_G$, from the step after it on. This needs eigenvectors, which
    ``inverse="auto"`` stores if ``like`` was made with ``bases=`` too. Inside ``lax.scan``, where
    the structure of the state may not change, ``like`` must be made so.

    Parameters that no factor covers follow plain gradient descent with the same learning
    rate, momentum and weight decay ($p = \nabla$, $\nu = 1$), or ``others``.

    A learning rate or momentum that is ``"quadratic"`` minimizes the model of the penalized
    loss $h(\theta) = L(\theta) + \tfrac w2 \|\theta\|^2$,

    $$ \Delta = -\eta p + \mu \Delta_{\text{last}}, \qquad
       M(\Delta) = \nabla h^\top \Delta
       + \tfrac12 \Delta^\top (F + (\lambda + w) I) \Delta , $$

    where $F$ is the ``curvature`` of the batch, not the factors, and $p = (\bar F + \gamma^2)^{-1}
    \nabla h$. Every 5th step, or as :class:`jaxkfac.LevenbergMarquardt` says, the loss at the new
    parameters is compared with the model's prediction, which adapts $\lambda$. $\gamma^2$ begins at
    $\lambda + w$ and is adapted separately. The adapted numbers are in ``state.adaptation``.

    Warning:
        Accumulate with :func:`multi_steps`, never with ``optax.MultiSteps``, which pools the
        gradients but passes on only the last micro-batch's factors. It runs without an error, and
        ``kfac`` cannot detect it. Without a norm constraint, at a damping of 1e-3, its update
        differed from the large batch's by 19 times the length of that update; with
        ``multi_steps`` the difference was 1e-13
        (``pytest jaxkfac/optim/_multi_steps_test.py -k around_kfac``).

    Args:
        learning_rate: $\eta$, a number (0.1 is a good first one), a schedule of the step, or
            ``"quadratic"``, the default.
        like: ``stats.factor_shapes(params, batch)``: which factors there are. Only layers, shapes,
            dtypes and the ``origin`` are read. The state's average and bases have this origin;
            factors of another Fisher type are averaged all the same.
        damping: $\delta \ge 0$ in units of the squared gradient, or a pair
            ``(damping_a, damping_g)`` in the units of each factor; numbers or schedules. Or a
            :class:`jaxkfac.LevenbergMarquardt` rule that adapts it. ``"auto"`` is that rule with a
            ``"quadratic"`` rate, else 0.1.
        damping_mode: ``"exact"``, ``"factored"`` or ``"pi"``. ``"auto"`` is ``"pi"`` with a
            ``"quadratic"`` rate, else ``"exact"``.
        decay: $\beta \in [0, 1)$ of the factor average; see
            :func:`jaxkfac.factors.update_average`.
        refresh_every: Steps between decompositions, at least 1. The first step that has factors
            always decomposes.
        momentum: $\mu \in [0, 1)$, or ``"quadratic"``. ``"auto"`` is ``"quadratic"`` with a
            ``"quadratic"`` rate, else 0.9.
        norm_constraint: $c > 0$, or ``None`` for no constraint. It counts only the leaves that
            factors cover. ``"auto"`` is none with a ``"quadratic"`` rate, else 0.01.
        weight_decay: $w \ge 0$, decoupled (not preconditioned, not part of the momentum), unless
            a rate is ``"quadratic"``. With ``others``, only for the parameters that factors cover.
        max_condition: $\kappa \ge 1$ of the eigenvalue clipping.
        floor: Smallest eigenvalue of a factor.
        others: An optax transformation for the parameters that no factor covers, complete
            with its own learning rate and sign, e.g. ``optax.adam(1e-3)``.
        inverse: What is stored at a refresh. ``"cholesky"``: inverses of the damped factors, with
            two products for each layer and step, for the separable dampings: ``"factored"``,
            ``"pi"`` or a pair. The damping is that of the refresh until the next one, and clipping
            is as in :func:`jaxkfac.curvature.invert`. ``"eigh"``: eigenvectors, with four products
            for each layer, for any damping, which is read at every step. ``"qr"``: eigenvectors
            that are updated, after the first refresh, by one step of orthogonal iteration, which
            takes 0.6 of the time. ``"host"``: eigenvectors computed by the host in float64;
            ``update`` is then called outside ``jit``. ``"auto"``: Cholesky if the damping is
            separable, else eigenvectors.
        stagger: Whether a refresh is spread over the steps between two. The layers are divided into
            at most ``refresh_every`` groups of about equal work (layers that share an input, or are
            stacked, stay together), and each group is refreshed at its own step. Each layer is
            still refreshed every ``refresh_every`` steps, from the average of that step, and all
            layers at the first step that has factors.
        distribute: A mesh axis whose devices share the decompositions of a refresh, divided by the
            cubes of their sizes. By default each device does all of them. The mesh is that of
            ``jax.set_mesh``, or outside ``jit`` of the parameters.

    Under ``optax.inject_hyperparams(jk.kfac)`` every number may change in flight, as
    ``state.hyperparams["damping"]``, except ``max_condition`` and ``floor``, which stay those of
    ``init``.

    Returns:
        A transformation used inside ``jit`` and ``lax.scan``: with a learning rate as
        ``tx.update(grads, state, params, factors=factors)``, without one as ``tx.update(grads,
        state, params, factors=factors, **stats.adaptation(params, batch, key))``.

        ``factors`` are required. They may be ``None``, or have counts of zero; then the average
        stays, and a refresh that is due uses it unchanged. Until the first factors come, steps are
        those of gradient descent; ``state.missed`` above 1 shows that they come too late
        (``every=``) or never. A call with a non-finite gradient or factor returns zeros and changes
        only ``state.skipped``; one whose factors have a sum above the square root of the
        largest number (1.8e19 in float32) is also counted in ``state.watch.outsized``. An average
        that is not finite all the same restarts with the next factors
        (``state.watch.restarted``). ``value=``, optax's name for the loss of the batch, is
        watched: ``state.diverged`` counts updates in a row at which it is not finite or has risen
        far above its first value, ten of them warn outside ``jit``, and
        :func:`jaxkfac.check_state` names the remedy.

        ``stats.adaptation`` returns ``value``, ``value_fn`` (this batch's loss as a function of
        the parameters) and ``curvature`` (its operator, as from
        ``jk.operators.ggn(objective, params, batch)``); they may also be passed one by one. Call
        an adaptive ``kfac`` inside ``jit``, and put it last in a chain. An update whose
        model or trial is not finite is not made, and is counted in ``state.adaptation.rejected``.

    Raises:
        ValueError: when built, naming the argument out of range; inverses for a damping that
            is not separable; or measured eigenvalues with ``refresh_every=1``, which would never
            use them. In ``update``: ``factors`` have other layers than ``like``, or are collected
            at some steps (``every=``) and none has come by the second refresh (checked outside
            ``jit``; inside, see ``state.missed``); the state belongs to another transformation;
            ``inverse="host"`` is traced; ``distribute`` names no axis of a known mesh; or what
            adaptation needs is missing, belongs to another batch, or is not where the last update
            led (checked outside ``jit``; inside, see ``state.adaptation.displaced``).
        TypeError: in ``update``, ``factors`` are left out.

    Memory:
        For each factor of size ``n``: ``n**2`` for its average and ``n**2 + n`` for its
        eigenbasis, or ``n**2`` for its inverse (with ``"pi"`` one of A for each layer); one copy
        of the parameters for the momentum; during a refresh the workspace of
        :func:`jaxkfac.curvature.eigendecompose` or :func:`jaxkfac.curvature.invert`. Gradients
        and factors of stacked layers (sides of at most 512) are copied once.

    Example:
        >>> import jax.numpy as jnp, jaxkfac as jk
        >>> params = {"kernel": jnp.ones((3, 2))}
        >>> objective = jk.Objective(lambda p, x: x @ p["kernel"], jk.Gaussian())
        >>> stats, batch = jk.value_grad_and_factors(objective), (jnp.eye(3), jnp.zeros((3, 2)))
        >>> value, grads, factors = stats(params, batch)
        >>> tx = jk.kfac(0.1, like=stats.factor_shapes(params, batch), damping=1.0)
        >>> state = tx.init(params)
        >>> updates, state = tx.update(grads, state, params, factors=factors)
        >>> print(updates["kernel"][0].round(3), int(state.step), int(state.skipped))
        [-0.02 -0.02] 1 0

    References:
        Martens and Grosse, Optimizing neural networks with Kronecker-factored approximate
        curvature, 2015. Ba, Grosse and Martens, Distributed second-order optimization
        using Kronecker-factored approximations, 2017 (the norm constraint).
    """
    by_model = isinstance(learning_rate, str)
    damping = _or_auto(damping, LevenbergMarquardt() if by_model else SAFE_DAMPING)
    mode = _or_auto(damping_mode, "pi" if by_model else "exact")
    momentum = _or_auto(momentum, "quadratic" if by_model else 0.9)
    constraint = _or_auto(norm_constraint, None if by_model else SAFE_NORM)
    adaptation = Adaptation.of(learning_rate, momentum, damping, constraint)
    # Numbers that the model chooses are not checked.
    rate = 0.0 if isinstance(learning_rate, str) else learning_rate
    first_momentum = 0.0 if isinstance(momentum, str) else momentum
    first_damping = initial_damping(damping)
    check_learning_rate(rate)
    check_scheduled_damping(first_damping, mode)
    clipping = known_clipping(max_condition, floor)
    check_numbers(
        refresh_every=refresh_every,
        momentum=first_momentum,
        norm_constraint=constraint,
        weight_decay=weight_decay,
    )
    shapes = shapes_of(like)
    measures = shapes.corrections is not None
    method = preconditioner_of(inverse, first_damping, mode, measures=measures)
    MeshAxis.check(distribute)
    if method.on_host and distribute is not None:
        raise ValueError(
            f'distribute={distribute!r} divides decompositions among devices, and inverse="host" '
            "makes them in host memory: choose one of both"
        )
    curvature = Curvature(
        shapes, Stacks.of(shapes), method, decay, refresh_every, stagger, clipping
    )
    tx = _Kfac(
        curvature=curvature,
        others=Others.of(others, curvature.covered),
        adaptation=adaptation,
        rate=rate,
        damping=first_damping,
        momentum=first_momentum,
        norm_constraint=constraint,
        weight_decay=weight_decay,
        distribute=distribute,
    )
    # optax types a state as a tree of arrays; this one also says which layers are stacked.
    return optax.GradientTransformationExtraArgs(cast(Any, tx.init), cast(Any, tx.update))


def _or_auto(choice: Any, automatic: Any) -> Any:
    return automatic if isinstance(choice, str) and choice == "auto" else choice


@dataclasses.dataclass(frozen=True, eq=False)
class _Kfac:
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
    staged: TraceCache[Staged] = dataclasses.field(default_factory=TraceCache)

    def init(self, params: PyTree) -> KfacState:
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
        updates: PyTree,
        state: Any,
        params: PyTree | None = None,
        *,
        value: ArrayLike | None = None,
        value_fn: Callable[[PyTree], ArrayLike] | None = None,
        curvature: Operator | BatchCurvature | None = None,
        **extra: Any,
    ) -> tuple[PyTree, KfacState]:
        """Check the arguments, then advance; outside ``jit`` by a cached trace."""
        grads, ours = updates, self.curvature  # optax calls both inputs and outputs updates
        if params is None and may_be_positive(self.weight_decay):
            raise ValueError("weight_decay needs the parameters: tx.update(grads, state, params)")
        factors = required_factors("kfac", extra)
        at_some_steps = isinstance(factors, Factors) and factors.loss_terms is not None
        if factors is not None:
            factors = ours.checked(factors)
        check_state("kfac", state, KfacState)
        check_same_model(
            state, ours.stacks, ours.method.stored_type, adapts=self.adaptation is not None
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
        concrete = all(is_concrete(x) for x in jax.tree.leaves(call))
        if not concrete and factors is not None:
            warn_of_growth(state, factors, stacklevel=3)
        if ours.method.on_host:
            call += (self._from_host(concrete, grads, state, factors),)
        step = functools.partial(self._advance_gathered, axis=axis, loss=loss)
        # Outside jit a later call only runs equations, because a new lax.cond compiles its
        # branches. Schedules are read at every call, and what `others` reads is not known.
        if self.others.tx is None and loss is None and concrete:
            step = self.staged.get(call, lambda: Staged.of(step, *call), static=axis)
        out, new = step(*call)
        warn_if_diverged(new, stacklevel=3)
        return out, new

    def _advance_gathered(
        self,
        grads: PyTree,
        state: KfacState,
        params: PyTree | None,
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
        self, concrete: bool, grads: PyTree, state: KfacState, factors: Factors | None
    ) -> Eigenbases | None:
        """New bases if they are due and the step is not going to be skipped."""
        if not concrete:
            raise ValueError(
                "inverse='host' decomposes outside of jit, and this update is traced: call "
                "tx.update outside of jit, scan and jk.multi_steps, or build with inverse='eigh'"
            )
        if self._is_burning(state) or not is_in_range(factors):
            return None
        if not all_finite(gradients_only(grads), factors):
            return None
        return self.curvature.from_host(state, factors)

    def advance(
        self,
        grads: PyTree,
        state: KfacState,
        params: PyTree | None,
        factors: Factors | None,
        numbers: tuple[Any, ...],
        extra: Any,
        from_host: Eigenbases | None = None,
        *,
        axis: MeshAxis | None,
        loss: BatchLoss | None,
    ) -> tuple[PyTree, KfacState]:
        """One update: average, refresh, precondition, constrain; skip or step; then descend."""
        curvature, adaptation, others = self.curvature, self.adaptation, self.others
        gradient, configured, value = gradients_only(grads), (self.rate, self.damping), numbers[-1]
        now = zip(configured, numbers[:-1], strict=True)
        rate, delta = (x if at is None else at for x, at in now)
        gamma, fixed_numbers = delta, Numbers(None, None, None)
        if adaptation is not None:
            delta = adaptation.damping_of(state, delta, self.weight_decay)
            gamma = adaptation.factor_damping_of(state, delta)
            gradient = adaptation.gradient_of(gradient, params, state.momentum, self.weight_decay)
            fixed_numbers = adaptation.numbers_of(rate, self.momentum, self.weight_decay)
        # Stacked before the cond, which then has few operands.
        stacked, new = curvature.stacks.tree(gradient), curvature.stacked(factors)
        finite, burning = all_finite(stacked, new), self._is_burning(state)
        sound = finite & is_in_range(new)

        def step() -> Any:
            (average, restarted), chosen = curvature.averaged(state, new), gamma
            refreshed = functools.partial(
                curvature.refreshed, state, average, new, axis=axis, from_host=from_host
            )
            early_refresh = None if curvature.method.damps_at_refresh else refreshed(gamma)
            if adaptation is not None and loss is not None and adaptation.two_dampings:

                def direction(damping: Any) -> PyTree:
                    bases = (
                        curvature.fresh(state, average, damping)
                        if early_refresh is None
                        else early_refresh[0]
                    )
                    steps = curvature.method.apply(stacked, bases, damping)
                    return curvature.stacks.unstacked_tree(steps, gradient)

                due = adaptation.is_trial_due(state.step, curvature.refresh_every)
                due &= curvature.refresh.is_due(state) & (average.terms > 0)
                configured = loss, fixed_numbers
                chosen = adaptation.tried_factor_damping(
                    state, gradient, direction, delta, *configured, due=due
                )
            bases, num_failed = refreshed(chosen) if early_refresh is None else early_refresh
            steps, scale = curvature.method.apply(stacked, bases, chosen), None
            if self.norm_constraint is not None:
                paths = curvature.stacked_paths
                scale = norm_scale(steps, stacked, paths, rate, self.norm_constraint)
            out = ((), state.others)
            if others.tx is not None:
                out = others.tx.update(grads, state.others, params, **extra)
                out = cast_like(grads, out[0]), out[1]
            num_updates = jnp.asarray(optax.safe_increment(state.step))
            counts = num_updates, state.skipped, state.kept + num_failed, restarted
            return (steps, scale), average, bases, out, chosen, *counts

        def skip() -> Any:
            # The skipped branch needs placeholders; reuse the gradients, which cost nothing.
            scale = None if self.norm_constraint is None else sound.astype(sum_dtype(stacked))
            out = () if others.tx is None else jax.tree.map(jnp.zeros_like, gradient)
            skipped = jnp.asarray(optax.safe_increment(state.skipped))
            unchanged = state.stacked_average, curvature.unchanged(state, new), (out, state.others)
            counts = state.step, skipped, state.kept, jnp.zeros((), jnp.int32)
            return (stacked, scale), *unchanged, gamma, *counts

        def average_alone() -> Any:
            steps, _, bases, others_result, _, num_updates, _, num_failed, _ = skip()
            average, restarted = curvature.averaged(state, new)
            return (
                steps,
                average,
                bases,
                others_result,
                gamma,
                num_updates,
                state.skipped,
                num_failed,
                restarted,
            )

        results = taken_where(sound, burning, step, skip, average_alone)
        (steps, scale), average, bases, (rest_out, rest_state), gamma, *counts = results
        num_updates, skipped, num_failed, restarted = counts
        # The results may be selected and scaled: their inputs are behind the cond.
        done, steps = skipped == state.skipped, curvature.stacks.unstacked_tree(steps, gradient)
        if scale is not None:
            steps = scale_covered(scale, steps, curvature.covered)
        came = jnp.asarray(False) if new is None else done & (new.terms > 0)
        due = done & curvature.refresh.is_due(state)
        watch = state.watch.after(value, came=came, due=due, begun=average.terms > 0)
        watch = watch.counting(outsized=finite & ~sound, restarted=restarted)
        missed = (num_updates != state.step) & curvature.refresh.is_missed(state, average)
        if loss is None or adaptation is None:
            velocity = advance_momentum(self.momentum, state.momentum, steps)
            velocity = where(done, velocity, state.momentum)
            out, adapted = descend(velocity, gradient, params, rate, self.weight_decay), ()
        else:
            out, velocity, adapted = adaptation.advance(
                state,
                params,
                gradient,
                steps,
                fixed_numbers,
                delta,
                loss,
                factor_damping=gamma,
                upcoming=at_step(self.damping, num_updates),
                num_updates=num_updates,
                is_made=done if burning is None else done & ~burning,
            )
            burned = jnp.zeros_like(done) if burning is None else done & burning
            adapted = adapted._replace(burned_in=adapted.burned_in + burned.astype(jnp.int32))
            stands = adapted.rejected == cast(AdaptationState, state.adaptation).rejected
            rest_out, rest_state = where(
                stands,
                (rest_out, rest_state),
                (jax.tree.map(jnp.zeros_like, rest_out), state.others),
            )
        out = others.joined(out, rest_out)
        out = where(done, out, jax.tree.map(jnp.zeros_like, out))
        return with_constants(grads, out), KfacState(
            step=num_updates,
            stacked_average=average,
            stacked_bases=bases,
            momentum=velocity,
            others=rest_state,
            skipped=skipped,
            kept=num_failed,
            missed=state.missed + missed.astype(jnp.int32),
            stacks=curvature.stacks,
            watch=watch,
            adaptation=adapted,
        )
