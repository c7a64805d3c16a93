"""K-FAC as an optax transformation, all in one graph."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Int

from jaxkfac.curvature import (
    Eigenbases,
    MeshAxis,
    covered_indices,
    eigendecompose,
    identity_bases,
    natural_gradient,
)
from jaxkfac.factors import (
    Factors,
    check_decay,
    check_factors,
    check_like,
    of_parameters,
    update_average,
    without_loss_terms,
    zeros_like,
)
from jaxkfac.interception import Staged, TraceCache
from jaxkfac.linalg import Damping, DampingMode
from jaxkfac.optim._descent import (
    advance_momentum,
    constrain_norm,
    descend,
    keep_where_not_finite,
    zero_momentum,
)
from jaxkfac.optim._explicit import is_sharded, sharded_like, whole
from jaxkfac.optim._injected import (
    check_numbers,
    clipping_of,
    clipping_of_init,
    known_clipping,
    may_be_positive,
)
from jaxkfac.optim._schedules import (
    Schedule,
    at_step,
    check_learning_rate,
    check_scheduled_damping,
    has_schedule,
)
from jaxkfac.optim._trees import (
    all_finite,
    cast_like,
    check_like_momentum,
    check_some_covered,
    check_state,
    covered_leaves,
    gradients_only,
    is_concrete,
    with_constants,
)

PyTree = Any


class KfacState(NamedTuple):
    """State of :func:`kfac`.

    Attributes:
        step: Updates made so far, int32; skipped ones do not count. Schedules and the
            refresh read it.
        average: Exponential average of the factors, as sums and counts.
        bases: Eigenbases of the average at the last refresh.
        momentum: Like the parameters, without those that ``others`` looks after.
        others: State of the ``others`` transformation.
        skipped: Updates left out because a gradient or a factor was not finite, int32.
        kept: Decompositions that were not finite and left the basis before them in
            place, int32.
    """

    step: Int[Array, ""]
    average: Factors
    bases: Eigenbases
    momentum: PyTree
    others: Any
    skipped: Int[Array, ""]
    kept: Int[Array, ""]


def kfac(
    learning_rate: ArrayLike | Schedule,
    *,
    like: Factors,
    damping: Damping | Schedule | tuple[Any, Any] = 1e-3,
    damping_mode: DampingMode = "exact",
    decay: ArrayLike = 0.95,
    refresh_every: ArrayLike = 10,
    momentum: ArrayLike = 0.9,
    norm_constraint: ArrayLike | None = None,
    weight_decay: ArrayLike = 0.0,
    max_condition: ArrayLike = 1e6,
    floor: ArrayLike = 0.0,
    others: optax.GradientTransformation | None = None,
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

    Parameters that no factor covers follow plain gradient descent with the same learning
    rate, momentum and weight decay ($p = \nabla$, $\nu = 1$), or ``others``.

    Warning:
        Accumulate with :func:`multi_steps`, never with ``optax.MultiSteps``: that pools the
        gradients and hands on the last micro-batch's factors as if they were everyone's. It
        runs without an error, and cannot be seen from here. Its update was 19 times its right
        length away from the large batch's, that of ``multi_steps`` 1e-13
        (``pytest jaxkfac/optim/_multi_steps_test.py -k around_kfac``).

    Args:
        learning_rate: $\eta$, a number or a schedule of the step.
        like: ``stats.factor_shapes(params, batch)``: which factors there are. Only layers,
            shapes and dtypes are read.
        damping: $\delta \ge 0$ in units of the squared gradient, or a pair
            ``(damping_a, damping_g)`` in the units of each factor; numbers or schedules.
        damping_mode: ``"exact"``, ``"factored"`` or ``"pi"``.
        decay: $\beta \in [0, 1)$ of the factor average; see
            :func:`jaxkfac.factors.update_average`.
        refresh_every: Steps between decompositions, at least 1. The first step that has factors
            always decomposes.
        momentum: $\mu \in [0, 1)$.
        norm_constraint: $c > 0$, or ``None`` for no constraint. Over the leaves that
            factors cover.
        weight_decay: $w \ge 0$, decoupled (not preconditioned, no part of the momentum).
            With ``others``, only for the parameters that factors cover.
        max_condition: $\kappa \ge 1$ of the eigenvalue clipping.
        floor: Smallest eigenvalue of a factor.
        others: An optax transformation for the parameters that no factor covers, complete
            with its own learning rate and sign, e.g. ``optax.adam(1e-3)``.
        distribute: A mesh axis, over whose devices the decompositions of a refresh are divided
            by the cubes of their sizes. By default each device does all of them. The mesh is
            that of ``jax.set_mesh``, or outside ``jit`` of the parameters.

    Under ``optax.inject_hyperparams(jk.kfac)`` every number may change in flight, as
    ``state.hyperparams["damping"]``, but for ``max_condition`` and ``floor``: those of ``init``
    hold.

    Returns:
        A transformation used as ``tx.update(grads, state, params, factors=factors)``,
        inside ``jit`` and ``lax.scan``. A call with a non-finite gradient or factor
        returns zeros and changes nothing but ``state.skipped``.

    Raises:
        ValueError: when built, naming the argument out of range; in ``update``, if
            ``factors`` is missing or of other layers than ``like``, or ``distribute`` names no
            axis of a known mesh.

    Memory:
        For each factor of size ``n``: ``n**2`` for its average and ``n**2 + n`` for its
        eigenbasis; one copy of the parameters for the momentum; during a refresh
        :func:`jaxkfac.curvature.eigendecompose`'s workspace.

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
    check_learning_rate(learning_rate)
    check_scheduled_damping(damping, damping_mode)
    clipping = known_clipping(max_condition, floor)
    check_decay(decay)
    check_numbers(
        refresh_every=refresh_every,
        momentum=momentum,
        norm_constraint=norm_constraint,
        weight_decay=weight_decay,
    )
    check_like(like)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), without_loss_terms(like))
    like = of_parameters(like)
    covered = covered_indices(like.layers)
    scheduled: tuple[Any, ...] = learning_rate, damping
    staged: TraceCache[Staged] = TraceCache()

    def not_ours(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda ours: not ours, covered_leaves(tree, covered))

    rest = None if others is None else optax.masked(others, not_ours)

    def init(params: PyTree) -> KfacState:
        check_some_covered("params", params, covered, "like=")
        return KfacState(
            step=jnp.zeros((), jnp.int32),
            average=zeros_like(like),
            bases=identity_bases(like, **clipping_of_init(clipping)),
            momentum=zero_momentum(params, covered, everywhere=rest is None),
            others=() if rest is None else rest.init(params),
            skipped=jnp.zeros((), jnp.int32),
            kept=jnp.zeros((), jnp.int32),
        )

    def update(
        updates: PyTree,
        state: Any,
        params: PyTree | None = None,
        *,
        factors: Factors | None = None,
        **extra: Any,
    ) -> tuple[PyTree, KfacState]:
        grads = updates  # optax's word for what comes in as well as for what goes out
        if factors is None:
            raise ValueError("kfac needs this step's factors: tx.update(..., factors=factors)")
        if params is None and may_be_positive(weight_decay):
            raise ValueError("weight_decay needs the parameters: tx.update(grads, state, params)")
        if isinstance(factors, Factors):
            factors = of_parameters(without_loss_terms(factors))
        check_factors(factors, like)
        check_state("kfac", state, KfacState)
        if state.average.layers != like.layers or state.average.bias != like.bias:
            raise ValueError(
                "kfac: the state is of another model than like=: make one with tx.init(params)"
            )
        check_like_momentum(grads, state.momentum)
        if params is not None:
            check_some_covered("params", params, covered, "like=")
        axis = None if distribute is None else MeshAxis.of(distribute, params, grads, state)
        numbers = tuple(at_step(x, state.step) if has_schedule(x) else None for x in scheduled)
        call = (grads, state, params, factors, numbers, extra)
        step = functools.partial(whole_advance, axis=axis)
        # Outside of jit a later call runs equations alone: a new lax.cond compiles its branches.
        # Schedules are read at every call, and what `others` may read is not known.
        if rest is None and all(is_concrete(x) for x in jax.tree.leaves(call)):
            return staged.get(call, lambda: Staged.of(step, *call), static=axis)(*call)
        return step(*call)

    def whole_advance(grads: PyTree, state: KfacState, *rest: Any, axis: MeshAxis | None) -> Any:
        if not is_sharded((grads, state, rest)):
            return advance(grads, state, *rest, axis=axis)
        out, new = advance(*whole((grads, state, *rest)), axis=axis)
        return sharded_like(out, grads), sharded_like(new, state)

    def advance(
        grads: PyTree,
        state: KfacState,
        params: PyTree | None,
        factors: Factors,
        numbers: tuple[Any, ...],
        extra: Any,
        *,
        axis: MeshAxis | None,
    ) -> tuple[PyTree, KfacState]:
        own, clipped = gradients_only(grads), clipping_of(state.bases, clipping)
        rate, delta = (x if now is None else now for x, now in zip(scheduled, numbers, strict=True))

        def step() -> tuple[PyTree, KfacState]:
            average = update_average(state.average, factors, decay)
            # Factors may be collected at some steps only, and the first of them later than step 0.
            due = (state.average.terms == 0) | (state.step % refresh_every == 0)
            bases, kept = jax.lax.cond(
                due & (average.terms > 0),
                lambda: keep_where_not_finite(
                    eigendecompose(average, placement="device", distribute=axis, **clipped),
                    state.bases,
                ),
                lambda: (state.bases, jnp.zeros((), jnp.int32)),
            )
            steps = natural_gradient(
                own,
                bases,
                damping=delta,
                damping_mode=damping_mode,
                missing="identity",
            )
            if norm_constraint is not None:
                steps = constrain_norm(steps, own, covered, rate, norm_constraint)
            velocity = advance_momentum(momentum, state.momentum, steps)
            out = descend(velocity, own, params, rate, weight_decay)
            rest_state = state.others
            if rest is not None:
                rest_out, rest_state = rest.update(grads, state.others, params, **extra)
                ours, rest_out = covered_leaves(own, covered), cast_like(grads, rest_out)
                out = jax.tree.map(lambda mine, x, y: x if mine else y, ours, out, rest_out)
            return out, KfacState(
                step=jnp.asarray(optax.safe_increment(state.step)),
                average=average,
                bases=bases,
                momentum=velocity,
                others=rest_state,
                skipped=state.skipped,
                kept=state.kept + kept,
            )

        def skip() -> tuple[PyTree, KfacState]:
            skipped = optax.safe_increment(state.skipped)
            return jax.tree.map(jnp.zeros_like, own), state._replace(skipped=skipped)

        # A cond, not a select of every leaf: XLA copies the reduction over all leaves into
        # each select, and compiles them for minutes (48 layers: 35 s of CPU against 10).
        out, state = jax.lax.cond(all_finite(own, factors), step, skip)
        return with_constants(grads, out), state

    return optax.GradientTransformationExtraArgs(init, update)
