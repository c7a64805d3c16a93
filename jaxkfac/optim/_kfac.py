"""K-FAC as an optax transformation that runs in one graph."""

from typing import Any, Literal

import jax
import optax
from jax.typing import ArrayLike

from jaxkfac._errors import one_of
from jaxkfac._mapped_axes import AxisName
from jaxkfac.blocks import Factors
from jaxkfac.curvature import MeshAxis
from jaxkfac.linalg.spectral import Damping, DampingMode
from jaxkfac.optim._adaptation import Adaptation
from jaxkfac.optim._curvature import Curvature, FactorTransformation, Others, as_optax
from jaxkfac.optim._damping_rules import DampingRule, LevenbergMarquardt
from jaxkfac.optim._kfac_state import KfacState
from jaxkfac.optim._kfac_update import KfacTransformation
from jaxkfac.optim._mapped_update import MappedAxes
from jaxkfac.optim._preconditioner import InverseMethod, preconditioner_of
from jaxkfac.optim._refresh import Periods
from jaxkfac.optim._schedules import (
    Schedule,
    check_auto,
    check_learning_rate,
    check_numbers,
    check_scheduled_damping,
    known_clipping,
    or_auto,
)
from jaxkfac.optim._stacks import Stacks

PyTree = Any

# With rates of 0.03, 0.1 and 0.3 no recorded run (benchmarks/results/optimizers) ended above its
# first loss. With a damping of 1e-3 and no norm constraint, the perceptron does at a rate of 0.01
# (tests/first_hour_test.py).
SAFE_DAMPING, SAFE_NORM = 0.1, 1e-2
PERIOD = 5  # steps between the refreshes for which factors are collected


def kfac(
    learning_rate: ArrayLike | Schedule | Literal["quadratic"] = "quadratic",
    *,
    like: Factors | None = None,
    damping: Damping | Schedule | tuple[Any, Any] | DampingRule | Literal["auto"] = "auto",
    damping_mode: DampingMode | Literal["auto"] = "auto",
    decay: ArrayLike | Literal["auto"] = "auto",
    refresh_every: ArrayLike | Literal["auto"] = "auto",
    momentum: ArrayLike | Literal["quadratic", "auto"] = "auto",
    norm_constraint: ArrayLike | Literal["auto"] | None = "auto",
    weight_decay: ArrayLike = 0.0,
    max_condition: ArrayLike = 1e6,
    floor: ArrayLike = 0.0,
    others: optax.GradientTransformation | None = None,
    inverse: InverseMethod = "auto",
    stagger: bool = False,
    distribute: str | None = None,
    packed: bool | Literal["auto"] = "auto",
    axis_name: AxisName = None,
) -> FactorTransformation:
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
    the structure of the state may not change, ``like`` must be made this way.

    Parameters that no factor covers follow plain gradient descent with the same learning
    rate, momentum and weight decay ($p = \nabla$, $\nu = 1$), or ``others``.

    A learning rate or momentum that is ``"quadratic"`` minimizes the model of the penalized
    loss $h(\theta) = L(\theta) + \tfrac w2 \|\theta\|^2$,

    $$ \Delta = -\eta p + \mu \Delta_{\text{last}}, \qquad
       M(\Delta) = \nabla h^\top \Delta
       + \tfrac12 \Delta^\top (F + (\lambda + w) I) \Delta , $$

    where $F$ is the ``curvature`` of the batch, not the factors, and $p = (\bar F + \gamma^2)^{-1}
    \nabla h$. The loss at the new parameters is compared with the model's prediction, which adapts
    $\lambda$. With :class:`jaxkfac.LevenbergMarquardt`, the default, a step that raises the loss of
    its batch is not made. $\gamma^2$ begins at $\lambda + w$ and is adapted separately. The adapted
    numbers are in ``state.adaptation``.

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
            dtypes, groups (``collect=``) and the ``origin`` are read. The state's average and bases
            have this origin; factors of another Fisher type are averaged all the same. It may be
            left out here and given to ``tx.init(params, like=like)``; :class:`jaxkfac.Optimizer`
            does that itself.
        damping: $\delta \ge 0$, added to the curvature of the mean loss, in units of its squared
            gradient, or a pair ``(damping_a, damping_g)`` in the units of each factor; numbers or
            schedules. Or a :class:`jaxkfac.DampingRule`, as :class:`jaxkfac.LevenbergMarquardt`,
            which ``"auto"`` is with a ``"quadratic"`` rate; else ``"auto"`` is 0.1.
        damping_mode: ``"exact"``, ``"factored"`` or ``"pi"``. ``"auto"`` is ``"pi"`` with a
            ``"quadratic"`` rate, else ``"exact"``.
        decay: $\beta \in [0, 1)$ of the factor average, for each step that brings factors; see
            :func:`jaxkfac.blocks.update_average`. ``"auto"``: 0.95 if every step does, and
            $0.95^k$ if every $k$-th does.
        refresh_every: Steps between decompositions, at least 1. The first step that has factors
            always decomposes. ``"auto"``: where factors are collected at some steps (``every=``),
            at these; otherwise 10. In :class:`jaxkfac.Optimizer`, which collects factors at the
            steps that decompose them, 5.
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
        packed: Whether the average, and stored inverses, hold one triangle of every matrix of size
            64 or more. ``state.average`` reads the same; eigenvectors cannot be packed. ``"auto"``
            packs if ``like`` is packed (``value_grad_and_factors(packed=True)``), or JAX's default
            device is no CPU; on a CPU, unfolding costs more time than it saves.
        axis_name: The mapped axes (``jax.pmap``, ``jax.shard_map``) whose devices hold parts of the
            batch. ``None`` if ``value_grad_and_factors(axis_name=)`` has reduced gradient and
            factors, which ``factors.origin`` shows, or if no axis is mapped. Names reduce what
            comes: gradient, ``value``, ``value_fn`` and ``curvature`` as means weighted by
            ``factors.terms``, and factors as sums. ``()`` says that you have reduced by hand.

    Under ``optax.inject_hyperparams(jk.kfac)`` every number may change in flight, as
    ``state.hyperparams["damping"]``, except ``max_condition`` and ``floor``, which stay those of
    ``init``. What is left ``"auto"`` is no number there.

    Returns:
        A transformation used inside ``jit`` and ``lax.scan``: with a learning rate as
        ``tx.update(grads, state, params, factors=factors)``, without one as ``tx.update(grads,
        state, params, factors=factors, **stats.adaptation(params, batch, key))``.

        ``factors`` are required. They may be ``None``, or have counts of zero; then the average
        stays, and a refresh that is due uses it unchanged. Until the first factors come, steps are
        those of gradient descent; ``state.missed`` above 1 shows that they come too late
        (``every=``) or never. A call with a non-finite gradient or factor returns zeros and changes
        only ``state.skipped``; one whose factors have a sum above the square root of the
        largest number (1.8e19 in float32) is also counted in ``state.watch.outsized``. If an
        average is not finite nevertheless, it restarts with the next factors
        (``state.watch.restarted``). ``value=``, optax's name for the loss of the batch, is
        watched: ``state.diverged`` counts updates in a row whose loss is not finite or far
        above the first one. Ten of them cause a warning outside ``jit``, and
        :func:`jaxkfac.check_state` names the remedy.

        With factors that come in turns (``value_grad_and_factors(collect=k)``), updates are zero
        and ``state.step`` stays until every group has come once: pass ``stats(..., step=)`` the
        number of the call, not ``state.step``. Layers of equal shape are then not stacked.

        ``stats.adaptation`` returns ``value``, ``value_fn`` (this batch's loss as a function of
        the parameters) and ``curvature`` (its operator, as from
        ``jk.operators.ggn(objective, params, batch)``); they may also be passed one by one. Call
        an adaptive ``kfac`` inside ``jit``, and put it last in a chain. An update is not made
        if the model or the loss after it is not finite, or if it raises the loss of the batch;
        ``state.adaptation.rejected`` counts these.

    Raises:
        ValueError: when built, naming the argument out of range; inverses for a damping that
            is not separable; or measured eigenvalues with ``refresh_every=1``, which would never
            use them. In ``update``: ``factors`` have other layers than ``like``, or are collected
            at some steps (``every=``) and none has come by the second refresh (checked outside
            ``jit``; inside, see ``state.missed``); the state belongs to another transformation;
            ``inverse="host"`` is traced; ``distribute`` names no axis of a known mesh; or what
            adaptation needs is missing, belongs to another batch, or is not where the last update
            led (checked outside ``jit``; inside, see ``state.adaptation.displaced``). On a mapped
            axis: nothing says who reduces, or ``axis_name`` is no axis of a map around the call.
        TypeError: in ``update``, ``factors`` are left out.

    Memory:
        For each factor of size ``n``: ``n**2`` for its average and ``n**2 + n`` for its
        eigenbasis, or ``n**2`` for its inverse (with ``"pi"`` one of A for each layer); averages
        and inverses take ``n (n + 1) / 2`` if they are ``packed``. One copy of the parameters for
        the momentum. During a refresh the workspace of one matrix, about ``5 n**2``, or on an
        accelerator of as many as take no more than the largest. Gradients and factors of stacked
        layers (sides of at most 512) are copied once.

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
    damping = or_auto(damping, LevenbergMarquardt() if by_model else SAFE_DAMPING)
    mode = or_auto(damping_mode, "pi" if by_model else "exact")
    momentum = or_auto(momentum, "quadratic" if by_model else 0.9)
    constraint = or_auto(norm_constraint, None if by_model else SAFE_NORM)
    adaptation = Adaptation.of(learning_rate, momentum, damping, constraint)
    # Numbers that the model chooses are not checked.
    rate = 0.0 if isinstance(learning_rate, str) else learning_rate
    first_momentum = 0.0 if isinstance(momentum, str) else momentum
    # A rule has one damping; which it is makes no difference before the first update.
    first_damping = 0.0 if isinstance(damping, DampingRule) else damping
    check_learning_rate(rate)
    check_scheduled_damping(first_damping, mode)
    clipping = known_clipping(max_condition, floor)
    check_numbers(
        refresh_every=1 if isinstance(refresh_every, str) else refresh_every,
        momentum=first_momentum,
        norm_constraint=constraint,
        weight_decay=weight_decay,
    )
    check_auto(decay=decay, refresh_every=refresh_every)
    one_of("packed", packed, (True, False, "auto"))
    MeshAxis.check(distribute)
    # What cannot go together is refused here, whichever factors there are.
    preconditioner_of(inverse, first_damping, mode, measures=False)

    def build(shapes: Factors) -> KfacTransformation:
        # By default_backend, which starts JAX: the shapes in like= name no device.
        packs = packed
        if packed == "auto":
            packs = shapes.is_packed or jax.default_backend() != "cpu"
        shapes = shapes.packed() if packs else shapes.unpacked()
        measures = shapes.corrections is not None
        method = preconditioner_of(inverse, first_damping, mode, measures=measures)
        if method.on_host and distribute is not None:
            raise ValueError(
                f"distribute={distribute!r} divides decompositions among devices, and "
                'inverse="host" makes them in host memory: choose one of both'
            )
        # Stacked layers would need arrays of all layers at every step.
        stacks = Stacks.of(shapes) if shapes.turn is None else Stacks.of_one(shapes)
        periods = Periods.of(shapes, refresh_every, decay, default=PERIOD, stagger=stagger)
        curvature = Curvature(shapes, stacks, method, periods, stagger, clipping)
        return KfacTransformation(
            curvature=curvature,
            others=Others.of(others, curvature.covered),
            adaptation=adaptation,
            rate=rate,
            damping=damping,
            momentum=first_momentum,
            norm_constraint=constraint,
            weight_decay=weight_decay,
            distribute=distribute,
            mapped=MappedAxes.of("kfac", axis_name, shapes),
        )

    return as_optax("kfac", like, build, KfacState)
