"""K-FAC as an optax transformation, all in one graph."""

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Int

from jaxkfac.curvature import Eigenbases, Inverses, MeshAxis, covered_indices
from jaxkfac.curvature.operators import Operator
from jaxkfac.factors import (
    Factors,
    check_decay,
    check_factors,
    check_like,
    of_parameters,
    update_average,
    with_origin,
    without_corrections,
    without_loss_terms,
    zeros_like,
)
from jaxkfac.interception import Staged, TraceCache
from jaxkfac.linalg import Damping, DampingMode
from jaxkfac.optim._adaptation import Adaptation, AdaptationState, BatchLoss
from jaxkfac.optim._descent import (
    advance_momentum,
    descend,
    norm_scale,
    scale_covered,
    where,
    zero_momentum,
)
from jaxkfac.optim._explicit import is_sharded, on_mesh_of, sharded_like, whole
from jaxkfac.optim._injected import (
    check_numbers,
    clipping_of,
    clipping_of_init,
    known_clipping,
    may_be_positive,
)
from jaxkfac.optim._levenberg_marquardt import LevenbergMarquardt, initial_damping
from jaxkfac.optim._periods import check_factors_have_come, check_measured_between
from jaxkfac.optim._preconditioner import InverseMethod, preconditioner_of
from jaxkfac.optim._refresh import RefreshInGraph
from jaxkfac.optim._schedules import (
    Schedule,
    at_step,
    check_learning_rate,
    check_scheduled_damping,
    has_schedule,
)
from jaxkfac.optim._stacks import Stacks
from jaxkfac.optim._trees import (
    all_finite,
    cast_like,
    check_like_momentum,
    check_some_covered,
    check_state,
    covered_leaves,
    gradients_only,
    is_concrete,
    sum_dtype,
    with_constants,
)

PyTree = Any


class KfacState(NamedTuple):
    """State of :func:`kfac`.

    Layers of one shape are kept stacked; ``average`` and ``bases`` read as those of the model.

    Attributes:
        step: Updates made so far, int32; skipped ones do not count. Schedules and the
            refresh read it.
        stacked_average: Exponential average of the factors of the stacked model, as sums and
            counts.
        stacked_bases: Eigenbases of that average at the last refresh, or the inverses of its
            damped factors.
        momentum: Like the parameters, without those that ``others`` looks after; the last update
            where the quadratic model chooses a rate.
        others: State of the ``others`` transformation.
        skipped: Updates left out because a gradient or a factor was not finite, int32.
        kept: Decompositions that were not finite and left what was before them in
            place, int32.
        missed: Refreshes that were due before any factor had come, int32: the first, and each
            ``refresh_every`` steps later. Above 1, collection and accumulation do not meet.
        stacks: Which layers are stacked; it holds no arrays.
        adaptation: Damping, rates and the last trial, where ``kfac`` adapts them; else ``()``.
    """

    step: Int[Array, ""]
    stacked_average: Factors
    stacked_bases: Eigenbases | Inverses
    momentum: PyTree
    others: Any
    skipped: Int[Array, ""]
    kept: Int[Array, ""]
    missed: Int[Array, ""]
    stacks: Stacks
    adaptation: AdaptationState | tuple[()] = ()

    @property
    def average(self) -> Factors:
        """Exponential average of the factors, as sums and counts."""
        return _read(self.stacks.unstacked_factors, self.stacked_average)

    @property
    def statistics(self) -> Factors:
        """The average, and of measured eigenvalues those since the last refresh."""
        corrections = None
        if isinstance(self.stacked_bases, Eigenbases):
            corrections = self.stacked_bases.corrections
        stacked = dataclasses.replace(self.stacked_average, corrections=corrections)
        return _read(self.stacks.unstacked_factors, stacked)

    @property
    def bases(self) -> Eigenbases:
        """Eigenbases of the average at the last refresh.

        Raises:
            ValueError: the state keeps inverses.
        """
        if isinstance(self.stacked_bases, Inverses):
            raise ValueError(
                "this state keeps inverses of damped factors, not eigenbases: build "
                "jk.kfac(..., inverse='eigh'), or take jk.eigendecompose(state.average)"
            )
        return _read(self.stacks.unstacked_bases, self.stacked_bases)


def _read(function: Callable[[Any], Any], stacked: Any) -> Any:
    """``function(stacked)``, also of shapes."""
    shapes = any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(stacked))
    return jax.eval_shape(function, stacked) if shapes else function(stacked)


def kfac(
    learning_rate: ArrayLike | Schedule | Literal["quadratic"],
    *,
    like: Factors,
    damping: Damping | Schedule | tuple[Any, Any] | LevenbergMarquardt = 1e-3,
    damping_mode: DampingMode = "exact",
    decay: ArrayLike = 0.95,
    refresh_every: ArrayLike = 10,
    momentum: ArrayLike | Literal["quadratic"] = 0.9,
    norm_constraint: ArrayLike | None = None,
    weight_decay: ArrayLike = 0.0,
    max_condition: ArrayLike = 1e6,
    floor: ArrayLike = 0.0,
    others: optax.GradientTransformation | None = None,
    inverse: InverseMethod = "auto",
    stagger: bool = False,
    distribute: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Kronecker-factored natural gradient descent with averages, refreshes and momentum.

    With $\bar F$ the exponential average of the factors, decomposed every
    ``refresh_every`` steps, $\mu$ the momentum, $\eta$ the learning rate:

    $$ p = (\bar F + \delta)^{-1} \nabla, \qquad
       \nu = \min\Bigl(1, \sqrt{c / (\eta^2 \langle p, \nabla \rangle)}\Bigr), \qquad
       m \leftarrow \mu m + \nu p, \qquad
       \Delta = -\eta\,(m + w\,\theta) . $$

    $\nu$ is the norm constraint: $\langle p, \nabla\rangle = \langle p, (\bar F +
    \delta) p\rangle$ bounds $\langle p, F p\rangle$, twice the KL divergence of a step.

    Factors from ``stats(..., bases=state.bases)`` also hold eigenvalues measured in the
    eigenvectors at hand (EKFAC). Where they do, their average since the last refresh takes the
    place of $\lambda_A \lambda_G$, from the step after it on. It takes eigenvectors, which
    ``inverse="auto"`` keeps if ``like`` was made with ``bases=`` too; inside ``lax.scan``, where
    the state may not gain an average on the way, ``like`` must be.

    Parameters that no factor covers follow plain gradient descent with the same learning
    rate, momentum and weight decay ($p = \nabla$, $\nu = 1$), or ``others``.

    With ``"quadratic"`` a rate is that at which the model of the penalised loss $h(\theta) =
    L(\theta) + \tfrac w2 \|\theta\|^2$ is least,

    $$ \Delta = -\eta p + \mu \Delta_{\text{last}}, \qquad
       M(\Delta) = \nabla h^\top \Delta
       + \tfrac12 \Delta^\top (F + (\lambda + w) I) \Delta , $$

    $F$ the ``curvature`` of the batch, not the factors; these are damped by $\delta = \lambda +
    w$ ($\gamma^2$ in the paper), and $p = (\bar F + \delta)^{-1} \nabla h$. Every 5th step, or as
    :class:`jaxkfac.LevenbergMarquardt` says, the loss at the new parameters is compared with the
    model's. What is adapted stands in ``state.adaptation``.

    Warning:
        Accumulate with :func:`multi_steps`, never with ``optax.MultiSteps``: that pools the
        gradients and hands on the last micro-batch's factors as if they were everyone's. It
        runs without an error, and cannot be seen from here. Its update was 19 times its right
        length away from the large batch's, that of ``multi_steps`` 1e-13
        (``pytest jaxkfac/optim/_multi_steps_test.py -k around_kfac``).

    Args:
        learning_rate: $\eta$, a number, a schedule of the step, or ``"quadratic"``.
        like: ``stats.factor_shapes(params, batch)``: which factors there are. Only layers,
            shapes and dtypes are read, and the ``origin``, which is that of the state's average and
            bases; factors of another Fisher type are averaged all the same.
        damping: $\delta \ge 0$ in units of the squared gradient, or a pair
            ``(damping_a, damping_g)`` in the units of each factor; numbers or schedules. Or
            :class:`jaxkfac.LevenbergMarquardt`, by which it is adapted.
        damping_mode: ``"exact"``, ``"factored"`` or ``"pi"``.
        decay: $\beta \in [0, 1)$ of the factor average; see
            :func:`jaxkfac.factors.update_average`.
        refresh_every: Steps between decompositions, at least 1. The first step that has factors
            always decomposes.
        momentum: $\mu \in [0, 1)$, or ``"quadratic"``.
        norm_constraint: $c > 0$, or ``None`` for no constraint. Over the leaves that
            factors cover.
        weight_decay: $w \ge 0$, decoupled (not preconditioned, no part of the momentum), but
            where a rate is ``"quadratic"``.
            With ``others``, only for the parameters that factors cover.
        max_condition: $\kappa \ge 1$ of the eigenvalue clipping.
        floor: Smallest eigenvalue of a factor.
        others: An optax transformation for the parameters that no factor covers, complete
            with its own learning rate and sign, e.g. ``optax.adam(1e-3)``.
        inverse: What is kept of a refresh. ``"cholesky"``: inverses of the damped factors, two
            products a layer and step, for the separable dampings: ``"factored"``, ``"pi"`` or a
            pair. The damping is that of the refresh until the next one, and clipping is as in
            :func:`jaxkfac.curvature.invert`. ``"eigh"``: eigenvectors, four products a layer,
            for any damping, read at every step. ``"host"``: the same, decomposed by the host in
            float64, where ``update`` is called outside of ``jit``. ``"auto"``: Cholesky where
            the damping is separable, else eigenvectors.
        stagger: Whether a refresh is spread over the steps between two: the layers in at most
            ``refresh_every`` parts of about equal work (layers that share an input, or are
            stacked, stay together), each at a step of its own. Each layer is still refreshed
            every ``refresh_every`` steps, from the average of that step, and all of them at the
            first step that has factors.
        distribute: A mesh axis, over whose devices the decompositions of a refresh are divided
            by the cubes of their sizes. By default each device does all of them. The mesh is
            that of ``jax.set_mesh``, or outside ``jit`` of the parameters.

    Under ``optax.inject_hyperparams(jk.kfac)`` every number may change in flight, as
    ``state.hyperparams["damping"]``, but for ``max_condition`` and ``floor``: those of ``init``
    hold.

    Returns:
        A transformation used as ``tx.update(grads, state, params, factors=factors)``,
        inside ``jit`` and ``lax.scan``. ``factors`` may be left out, or have counts of zero: then
        the average stays, and a refresh that is due takes it as it is. Until the first ones come,
        steps are those of gradient descent; ``state.missed`` above 1 says that they come too late
        (``every=``) or never. A call with a non-finite gradient or factor returns zeros and changes
        nothing but ``state.skipped``.
        A ``kfac`` that adapts itself also takes ``value=loss``, ``value_fn=``, a function of the
        parameters that is this batch's loss, and ``curvature=``, its operator
        (``jk.operators.ggn(objective, params, batch)``). It is called inside ``jit``, and stands
        last in its chain. An update whose model or trial is not finite is not made, and counted
        in ``state.adaptation.rejected``.

    Raises:
        ValueError: when built, naming the argument out of range, inverses for a damping that
            is not separable, or measured eigenvalues with ``refresh_every=1``, which would never
            use them; in ``update``, if ``factors`` are of other layers than ``like``, or of some
            steps (``every=``) of which none has come by the second refresh (seen outside of
            ``jit``; inside see ``state.missed``), the state is of another transformation,
            ``inverse="host"`` is traced, ``distribute`` names no axis of a known mesh, or what
            adaptation needs is missing, of another batch, or not where the last update led (seen
            outside of ``jit``; inside see ``state.adaptation.displaced``).

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
    adaptation = Adaptation.of(learning_rate, momentum, damping, norm_constraint)
    # What the model chooses is not looked at.
    given_rate = 0.0 if isinstance(learning_rate, str) else learning_rate
    given_momentum = 0.0 if isinstance(momentum, str) else momentum
    given_damping = initial_damping(damping)
    check_learning_rate(given_rate)
    check_scheduled_damping(given_damping, damping_mode)
    clipping = known_clipping(max_condition, floor)
    check_decay(decay)
    check_numbers(
        refresh_every=refresh_every,
        momentum=given_momentum,
        norm_constraint=norm_constraint,
        weight_decay=weight_decay,
    )
    check_like(like)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), without_loss_terms(like))
    like = of_parameters(like)
    measures = like.corrections is not None
    method = preconditioner_of(inverse, given_damping, damping_mode, measures=measures)
    method.check_stagger(stagger=stagger, measures=measures)
    check_measured_between(refresh_every, measures=measures)
    MeshAxis.check(distribute)
    if method.on_host and distribute is not None:
        raise ValueError(
            f'distribute={distribute!r} divides decompositions among devices, and inverse="host" '
            "makes them in host memory: choose one of both"
        )
    covered, stacks = covered_indices(like.layers), Stacks.of(like)
    stacked_like = jax.eval_shape(stacks.factors, like)
    bare, stacked_paths = without_corrections(stacked_like), covered_indices(stacked_like.layers)
    refresh = RefreshInGraph(method, bare, refresh_every, stagger=stagger)
    scheduled: tuple[Any, ...] = given_rate, given_damping
    staged: TraceCache[Staged] = TraceCache()

    def not_ours(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda ours: not ours, covered_leaves(tree, covered))

    rest = None if others is None else optax.masked(others, not_ours)

    def init(params: PyTree) -> KfacState:
        check_some_covered("params", params, covered, "like=")
        first = jnp.zeros((), jnp.int32)
        held = clipping_of_init(clipping)
        delta = at_step(given_damping, first)
        bases = method.initial(bare, delta, held)
        state = KfacState(
            step=first,
            stacked_average=zeros_like(bare),
            stacked_bases=method.with_corrections(bases, stacked_like.corrections),
            momentum=zero_momentum(params, covered, everywhere=rest is None),
            others=() if rest is None else rest.init(params),
            skipped=jnp.zeros((), jnp.int32),
            kept=jnp.zeros((), jnp.int32),
            missed=jnp.zeros((), jnp.int32),
            stacks=stacks,
            adaptation=() if adaptation is None else adaptation.initial(params, delta),
        )
        return on_mesh_of(params, state)

    def update(
        updates: PyTree,
        state: Any,
        params: PyTree | None = None,
        *,
        factors: Factors | None = None,
        value: ArrayLike | None = None,
        value_fn: Callable[[PyTree], ArrayLike] | None = None,
        curvature: Operator | None = None,
        **extra: Any,
    ) -> tuple[PyTree, KfacState]:
        grads = updates  # optax's word for what comes in as well as for what goes out
        if params is None and may_be_positive(weight_decay):
            raise ValueError("weight_decay needs the parameters: tx.update(grads, state, params)")
        at_some_steps = isinstance(factors, Factors) and factors.loss_terms is not None
        if factors is not None:
            if isinstance(factors, Factors):
                factors = of_parameters(without_loss_terms(factors))
            check_factors(factors, like)
            method.check_stagger(stagger=stagger, measures=factors.corrections is not None)
            method.check_measured(factors)
            check_measured_between(refresh_every, measures=factors.corrections is not None)
        check_state("kfac", state, KfacState)
        _check_held(state, stacks, method.kept, adapts=adaptation is not None)
        if factors is not None:  # the state keeps its structure, whatever comes
            factors = with_origin(factors, state.stacked_average.origin)
        if at_some_steps:
            check_factors_have_come(state.missed, state.stacked_average, factors)
        check_like_momentum(grads, state.momentum)
        if params is not None:
            check_some_covered("params", params, covered, "like=")
        loss = None
        if adaptation is not None:
            loss = adaptation.loss(params, value, value_fn, curvature)
            terms = None if factors is None else factors.terms
            adaptation.check(state, params, terms, loss)
        extra |= {
            name: x
            for name, x in (("value", value), ("value_fn", value_fn))
            if x is not None and rest is not None
        }
        axis = None if distribute is None else MeshAxis.of(distribute, params, grads, state)
        numbers = tuple(at_step(x, state.step) if has_schedule(x) else None for x in scheduled)
        call: tuple[Any, ...] = (grads, state, params, factors, numbers, extra)
        concrete = all(is_concrete(x) for x in jax.tree.leaves(call))
        if not concrete and factors is not None:
            _warn_of_growth(state, factors)
        if method.on_host:
            call += (refresh_on_host(concrete, *call),)
        step = functools.partial(whole_advance, axis=axis, loss=loss)
        # Outside of jit a later call runs equations alone: a new lax.cond compiles its branches.
        # Schedules are read at every call, and what `others` may read is not known.
        if rest is None and loss is None and concrete:
            return staged.get(call, lambda: Staged.of(step, *call), static=axis)(*call)
        return step(*call)

    def whole_advance(
        grads: PyTree,
        state: KfacState,
        params: PyTree | None,
        *rest: Any,
        axis: MeshAxis | None,
        loss: BatchLoss | None,
    ) -> Any:
        given = (grads, state, params, *rest)
        if not is_sharded(given):
            return advance(*given, axis=axis, loss=loss)
        loss = None if loss is None else loss.of_whole(params)
        out, new = advance(*cast(Any, whole(given)), axis=axis, loss=loss)
        return sharded_like(out, grads), _sharded_state(new, state)

    def averaged(state: KfacState, factors: Factors | None) -> Factors:
        if factors is None:
            return state.stacked_average
        return update_average(state.stacked_average, without_corrections(factors), decay)

    def is_burning(state: KfacState) -> Any:
        """Whether this update is of the burn-in; ``None`` where there is none."""
        if adaptation is None or not adaptation.burn_in:
            return None
        return cast(AdaptationState, state.adaptation).burned_in < adaptation.burn_in

    def refresh_on_host(
        concrete: bool,
        grads: PyTree,
        state: KfacState,
        params: PyTree,
        factors: Factors | None,
        numbers: tuple[Any, ...],
        extra: Any,
    ) -> Eigenbases | None:
        """New bases where they are due, and the step is not going to be skipped."""
        if not concrete:
            raise ValueError(
                "inverse='host' decomposes outside of jit, and this update is traced: call "
                "tx.update outside of jit, scan and jk.multi_steps, or build with inverse='eigh'"
            )
        if is_burning(state) or not all_finite(gradients_only(grads), factors):
            return None
        new = None if factors is None else stacks.factors(factors)
        average = averaged(state, new)
        if not (refresh.is_due(state) and average.terms > 0):
            return None
        return method.fresh(average, 0.0, clipping_of(state.stacked_bases, clipping), None)

    def advance(
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
        own, clipped = gradients_only(grads), clipping_of(state.stacked_bases, clipping)
        rate, delta = (x if now is None else now for x, now in zip(scheduled, numbers, strict=True))
        if adaptation is not None:
            delta = adaptation.damping_of(state, delta, weight_decay)
            own = adaptation.gradient_of(own, params, state.momentum, weight_decay)
        # Stacked ahead of the cond, which then has few operands.
        stacked = stacks.tree(own)
        # Unfused from what made them: XLA would write a matrix and its finiteness side by side, and
        # copy what a panel is written into.
        new = None if factors is None else jax.lax.optimization_barrier(stacks.factors(factors))
        finite, burning = all_finite(stacked, new), is_burning(state)

        def step() -> Any:
            average = averaged(state, new)
            held, more = method.advanced(state.stacked_bases, new, decay)
            if method.on_host:
                bases = held if from_host is None else from_host
                kept, due = jnp.zeros((), jnp.int32), jnp.asarray(from_host is not None)
            else:
                bases, kept = refresh(state, held, average, delta, clipped, axis)
                due = refresh.is_due(state) & (average.terms > 0)
            bases = method.measured_since(bases, more, due)
            steps = method.apply(stacked, bases, delta)
            scale = None
            if norm_constraint is not None:
                scale = norm_scale(steps, stacked, stacked_paths, rate, norm_constraint)
            out = ((), state.others)
            if rest is not None:
                out = rest.update(grads, state.others, params, **extra)
                out = cast_like(grads, out[0]), out[1]
            taken = jnp.asarray(optax.safe_increment(state.step))
            return (steps, scale), average, bases, out, taken, state.skipped, state.kept + kept

        def skip() -> Any:
            # Any numbers will do for steps that are not taken: those that are there cost nothing.
            scale = None if norm_constraint is None else finite.astype(sum_dtype(stacked))
            steps = stacked, scale
            out = () if rest is None else jax.tree.map(jnp.zeros_like, own)
            skipped = jnp.asarray(optax.safe_increment(state.skipped))
            bare_bases, more = method.advanced(state.stacked_bases, new, None)
            bases = method.measured_since(bare_bases, more, jnp.asarray(False))
            held = state.stacked_average, bases, (out, state.others)
            return steps, *held, state.step, skipped, state.kept

        def average_alone() -> Any:
            steps, _, bases, others, taken, _, kept = skip()
            return steps, averaged(state, new), bases, others, taken, state.skipped, kept

        # A cond, not a select of every leaf: XLA copies the reduction over all leaves into
        # each select, and compiles them for minutes (48 layers: 35 s of CPU against 10).
        if burning is None:
            results = jax.lax.cond(finite, step, skip)
        else:
            branch = jnp.where(finite, jnp.where(burning, 2, 1), 0)
            results = jax.lax.switch(branch, [skip, step, average_alone])
        (steps, scale), average, bases, (rest_out, rest_state), taken, skipped, kept = results
        # Its results may be selected and scaled by: what they are made of is behind the cond.
        done, steps = skipped == state.skipped, stacks.unstacked_tree(steps, own)
        if scale is not None:
            steps = scale_covered(scale, steps, covered)
        missed = (taken != state.step) & refresh.is_missed(state, average)
        if loss is None or adaptation is None:
            velocity = advance_momentum(given_momentum, state.momentum, steps)
            velocity = where(done, velocity, state.momentum)
            out, adapted = descend(velocity, own, params, rate, weight_decay), ()
        else:
            numbers = adaptation.given(rate, given_momentum, weight_decay)
            made = done if burning is None else done & ~burning
            out, velocity, adapted = adaptation.advance(
                state,
                params,
                own,
                steps,
                numbers,
                delta,
                loss,
                upcoming=at_step(given_damping, taken),
                taken=taken,
                made=made,
            )
            adapted = adapted._replace(
                burned_in=adapted.burned_in + (done & ~made).astype(jnp.int32)
            )
            stands = adapted.rejected == cast(AdaptationState, state.adaptation).rejected
            rest_out, rest_state = where(
                stands,
                (rest_out, rest_state),
                (jax.tree.map(jnp.zeros_like, rest_out), state.others),
            )
        if rest is not None:
            ours = covered_leaves(own, covered)
            out = jax.tree.map(lambda mine, x, y: x if mine else y, ours, out, rest_out)
        out = where(done, out, jax.tree.map(jnp.zeros_like, out))
        return with_constants(grads, out), KfacState(
            step=taken,
            stacked_average=average,
            stacked_bases=bases,
            momentum=velocity,
            others=rest_state,
            skipped=skipped,
            kept=kept,
            missed=state.missed + missed.astype(jnp.int32),
            stacks=stacks,
            adaptation=adapted,
        )

    # optax types a state as a tree of arrays; ours says which layers are stacked, too.
    return optax.GradientTransformationExtraArgs(cast(Any, init), cast(Any, update))


def _sharded_state(new: KfacState, old: KfacState) -> KfacState:
    """Sharded as it was. Measured eigenvalues that it gains are whole on every device."""
    held, before = new.stacked_bases, old.stacked_bases
    if not (_measures(held) and not _measures(before)):
        return sharded_like(new, old)
    assert isinstance(held, Eigenbases)
    bare = dataclasses.replace(held, corrections=None)
    same = sharded_like(new._replace(stacked_bases=bare), old)
    both = dataclasses.replace(same.stacked_bases, corrections=held.corrections)
    return same._replace(stacked_bases=both)


def _warn_of_growth(state: KfacState, factors: Factors) -> None:
    """Say what ``lax.scan`` is going to refuse, in words that name the remedy."""
    if factors.corrections is not None and not _measures(state.stacked_bases):
        warnings.warn(
            "kfac: the factors hold eigenvalues measured in eigenbases (bases=), and like= has "
            "none, so that the state gains their average in this call: jit compiles it once more, "
            "and lax.scan refuses a carry that changes its form. Make like= of the bases of a "
            "first state: like=stats.factor_shapes(params, batch, bases=jax.eval_shape(tx.init, "
            "params).bases)",
            stacklevel=3,
        )


def _measures(held: Eigenbases | Inverses) -> bool:
    return isinstance(held, Eigenbases) and held.corrections is not None


def _check_held(state: KfacState, stacks: Stacks, kept: type, *, adapts: bool) -> None:
    """Refuse a state of another model, or with another preconditioner."""
    if not isinstance(state.stacks, Stacks):
        raise ValueError(
            "kfac: the state was saved by an earlier version, which kept each layer by itself: "
            "make a new one with tx.init(params), and give it the momentum and step of the old"
        )
    if state.stacks != stacks:
        raise ValueError(
            "kfac: the state is of another model than like=: make one with tx.init(params)"
        )
    if not isinstance(state.stacked_bases, kept):
        raise ValueError(
            f"kfac: the state keeps {type(state.stacked_bases).__name__}, and with this inverse= "
            f"and damping_mode= expected {kept.__name__}: make a new one with tx.init(params)"
        )
    if isinstance(state.adaptation, AdaptationState) is not adapts:
        raise ValueError(
            f"kfac: the state {'does not adapt' if adapts else 'adapts'} itself, and this kfac "
            f"{'does' if adapts else 'does not'}: make a new one with tx.init(params)"
        )
