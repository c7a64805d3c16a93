"""Adam in the Kronecker-factored eigenbasis, as an optax transformation."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Int

from jaxkfac._arguments import ArrayTree
from jaxkfac._errors import at_least_one, one_of, scalar
from jaxkfac._mapped_axes import AxisName
from jaxkfac.blocks import Factors
from jaxkfac.curvature import Eigenbases, parameters_outside
from jaxkfac.linalg.spectral import Damping, into_eigenbasis, out_of_eigenbasis
from jaxkfac.optim._covariances import Covariance, Covariances
from jaxkfac.optim._curvature import (
    Curvature,
    FactorShapes,
    FactorTransformation,
    Others,
    as_optax,
)
from jaxkfac.optim._kfac_state import check_storage
from jaxkfac.optim._mapped_update import MappedAxes
from jaxkfac.optim._preconditioner import preconditioner_of
from jaxkfac.optim._quadratic_model import BatchLoss
from jaxkfac.optim._refresh import DECAY, Periods
from jaxkfac.optim._schedules import (
    Schedule,
    check_auto,
    check_learning_rate,
    check_weight_decay,
)
from jaxkfac.optim._stacks import Stacks
from jaxkfac.optim._trees import descend, gradients_only, scaled, zero_momentum
from jaxkfac.optim._update import (
    Descent,
    Direction,
    FactorOptimizer,
    Moved,
    Update,
    UpdateArguments,
)
from jaxkfac.optim._watch import StateWatch

PERIOD = 10  # steps between the refreshes for which factors are collected


class KfeAdamState(NamedTuple):
    """State of :func:`kfe_adam`.

    Layers of one shape are stored stacked.

    Attributes:
        step: Updates made so far, int32; skipped ones do not count.
        stacked_average: Exponential average of the covariances that are decomposed: those of the
            factors, and those of the gradient for sides that factors store as diagonals.
        stacked_bases: Eigenbases of that average at the last refresh.
        first: First moments, like the parameters, not rotated.
        second: Second moments of the rotated gradient, ``{layer: (stack..., in[+1], out)}`` of the
            stacked model, and those of plain Adam, ``{parameter: leaf}``.
        others: State of the ``others`` transformation.
        skipped: Updates left out because a gradient or a factor was not finite, or a factor was
            too large to be averaged (``watch.outsized``), int32.
        kept: Decompositions that were not finite, so that the previous result stayed, int32.
        missed: Refreshes that were due before any factor had come, int32.
        stacks: Which layers are stacked; it holds no arrays.
        shapes: Which factors it takes; it holds no arrays.
        watch: Counters that :func:`check_state` reads; ``diverged`` is one of them.
    """

    step: Int[Array, ""]
    stacked_average: Factors
    stacked_bases: Eigenbases
    first: ArrayTree
    second: dict[str, Array]
    others: Any
    skipped: Int[Array, ""]
    kept: Int[Array, ""]
    missed: Int[Array, ""]
    stacks: Stacks
    shapes: FactorShapes
    watch: StateWatch

    @property
    def diverged(self) -> Int[Array, ""]:
        """Updates in a row whose ``value=`` was not finite, or far above the first one."""
        return self.watch.diverged

    @property
    def statistics(self) -> Factors:
        """Shapes of the factors that an update takes."""
        return self.shapes.like


def kfe_adam(
    learning_rate: ArrayLike | Schedule,
    *,
    like: Factors | None = None,
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-8,
    weight_decay: ArrayLike = 0.0,
    decay: ArrayLike | Literal["auto"] = "auto",
    refresh_every: int | Literal["auto"] = "auto",
    refresh: Literal["qr", "eigh"] = "qr",
    max_side: int = 1024,
    covariance: Covariance = "factors",
    others: optax.GradientTransformation | None = None,
    axis_name: AxisName = None,
) -> FactorTransformation:
    r"""Adam with second moments of the gradient in K-FAC's eigenvectors.

    With $Q_A, Q_G$ the eigenvectors of the averaged factors of a layer, $\nabla$ its gradient as
    a matrix ``(in[+1], out)`` and $m, v$ Adam's moments,

    $$ m \leftarrow \beta_1 m + (1 - \beta_1) \nabla, \qquad
       v \leftarrow \beta_2 v + (1 - \beta_2) (Q_A^\top \nabla Q_G)^2, \qquad
       \Delta = -\eta \Bigl(Q_A \frac{Q_A^\top \hat m\, Q_G}{\sqrt{\hat v} + \epsilon} Q_G^\top
       + w\,\theta\Bigr), $$

    with $\hat m, \hat v$ debiased. There is no damping to choose: use a learning rate for Adam, or
    a few times that. A refresh changes $Q$ and keeps $v$.

    Parameters without two factors (scales, lone biases), and parts of parameters that no layer
    covers, follow plain Adam. A side that factors store as a diagonal (the vocabulary of an
    embedding) uses the average of the gradient's own covariance, $\nabla \nabla^\top$ or
    $\nabla^\top \nabla$, up to ``max_side``; a larger side is not rotated. With
    ``covariance="gradient"`` every side uses it, in SOAP's order (the first gradient only fills the
    covariances, and a refresh comes before the step's own gradient). That is SOAP.

    Args:
        learning_rate: $\eta$, a number or a schedule of the step.
        like: ``stats.factor_shapes(params, batch)``: which factors there are. If it is packed
            (``value_grad_and_factors(packed=True)``), the average is stored packed too. It may be
            left out here and given to ``tx.init(params, like=like)``; :class:`jaxkfac.Optimizer`
            does that itself.
        b1: $\beta_1 \in [0, 1)$.
        b2: $\beta_2 \in [0, 1)$.
        eps: $\epsilon > 0$, in units of the gradient.
        weight_decay: $w \ge 0$, decoupled; with ``others`` only for the parameters covered.
        decay: Decay of the average of the factors, in $[0, 1)$, for each step that brings factors.
            ``"auto"``: 0.95 if every step does (a covariance of the gradient alone always does),
            and $0.95^k$ if every $k$-th does.
        refresh_every: Steps between refreshes, at least 1. The first step that has factors always
            decomposes. ``"auto"``: where factors are collected at some steps (``every=``), at
            these; otherwise 10. :class:`jaxkfac.Optimizer` collects factors at the steps that
            decompose them.
        refresh: ``"eigh"``: eigendecompositions. ``"qr"``: after the first of these, one step of
            orthogonal iteration, which takes 0.6 of the time.
        max_side: Largest side of a gradient's covariance.
        covariance: What defines the rotation of the sides: ``"factors"``, or the ``"gradient"``'s
            own covariance.
        others: An optax transformation for the parameters that no factor covers, complete with
            its own learning rate and sign.
        axis_name: As for :func:`jaxkfac.kfac`.

    Returns:
        A transformation used as ``tx.update(grads, state, params, factors=factors)``, inside
        ``jit``, ``lax.scan`` and :func:`multi_steps`. ``factors`` are required; ``None`` means that
        none come with this step. It also takes optax's ``value=``, for ``state.diverged``. A call
        with a non-finite gradient or factor, or one above the square root of the largest number,
        returns zeros and changes only ``state.skipped`` and ``state.watch``.

    Raises:
        ValueError: when built, naming the argument out of range; in ``update``, if ``factors`` or
            the state belong to another model, or ``weight_decay`` has no parameters.
        TypeError: in ``update``, ``factors`` are left out.

    Memory:
        First and second moments, as in Adam; for each side of size ``n``, ``n**2`` for its average
        (``n (n + 1) / 2`` if ``like`` is packed) and ``n**2 + n`` for its eigenvectors.

    Example:
        >>> import jax.numpy as jnp, jaxkfac as jk
        >>> params = {"kernel": jnp.ones((3, 2))}
        >>> objective = jk.Objective(lambda p, x: x @ p["kernel"], jk.Gaussian())
        >>> stats, batch = jk.value_grad_and_factors(objective), (jnp.eye(3), jnp.zeros((3, 2)))
        >>> value, grads, factors = stats(params, batch)
        >>> tx = jk.kfe_adam(0.01, like=stats.factor_shapes(params, batch))
        >>> updates, state = tx.update(grads, tx.init(params), params, factors=factors, value=value)
        >>> updates["kernel"].shape, int(state.step), int(state.diverged)
        ((3, 2), 1, 0)

    References:
        George et al., Fast approximate natural gradient descent in a Kronecker-factored
        eigenbasis, 2018 (the basis). Vyas et al., SOAP: Improving and stabilizing Shampoo using
        Adam, 2024 (the same in Shampoo's).
    """
    check_learning_rate(learning_rate)
    for name, beta in (("b1", b1), ("b2", b2)):
        scalar(name, beta, "a number in [0, 1)")
        if not 0 <= beta < 1:
            raise ValueError(f"{name} must be in [0, 1), got {beta}")
    scalar("eps", eps, "a positive number")
    if not 0 < eps < math.inf:
        raise ValueError(f"eps must be positive, got {eps}")
    check_weight_decay(weight_decay)
    one_of("refresh", refresh, ("qr", "eigh"))
    one_of("covariance", covariance, ("factors", "gradient"))
    check_auto(decay=decay, refresh_every=refresh_every)
    if not isinstance(refresh_every, str):
        at_least_one(refresh_every=refresh_every)
    if max_side < 0:
        raise ValueError(
            f"max_side={max_side}: expected a size, or 0 to use no covariance of the gradient"
        )

    def build(shapes: Factors) -> _KfeAdam:
        shapes = dataclasses.replace(shapes, corrections=None)
        if shapes.turn is not None:
            raise ValueError(
                f"like=: its factors come in turns (collect={shapes.turn.of}), and kfe_adam "
                "averages those of all layers at each step: leave collect= out, or use jk.kfac"
            )
        stacks = Stacks.of(shapes)
        method = preconditioner_of(refresh, 0.0, "exact", measures=False)
        periods = Periods.of(shapes, refresh_every, decay, default=PERIOD)
        if covariance == "gradient" and isinstance(decay, str):
            periods = periods._replace(decay=DECAY)  # each step brings a gradient
        options = (periods, False, {"max_condition": math.inf, "floor": 0.0})
        collected = Curvature(shapes, stacks, method, *options)
        sides = Covariances.of(collected.stacked_like, covariance, max_side)
        return _KfeAdam(
            collected=collected,
            sides=sides,
            curvature=Curvature(sides.like, Stacks.of_one(sides.like), method, *options),
            others=Others.of(others, collected.covered),
            rate=learning_rate,
            b1=b1,
            b2=b2,
            eps=eps,
            weight_decay=weight_decay,
            mapped=MappedAxes.of("kfe_adam", axis_name, shapes),
        )

    return as_optax("kfe_adam", like, build, KfeAdamState)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class _KfeAdam(FactorOptimizer):
    """Adam's moments in the eigenvectors, and descent.

    Attributes:
        collected: The factors that come: their layers, and which of these are stacked.
        sides: What is averaged of the factors and of the gradient.
        b1: Decay of the first moments.
        b2: Decay of the second moments.
        eps: Added to the square root of the second moments.
    """

    name = "kfe_adam"
    state_type = KfeAdamState

    collected: Curvature
    sides: Covariances
    b1: float
    b2: float
    eps: float

    @property
    def incoming(self) -> Curvature:
        return self.collected

    @property
    def averages_last(self) -> bool:
        """SOAP's order: the first gradient only fills the covariances, and later ones are added
        after the refresh.
        """
        return self.sides.alone

    # ---------------- the state

    def initial(self, params: ArrayTree) -> tuple[Damping, dict[str, Any]]:
        covered, everywhere = self.collected.covered, self.others.tx is None
        first = zero_momentum(params, covered, everywhere=everywhere)
        leaves, dtype = self.collected.stacks.tree(first), self.curvature.like.terms.dtype
        second = {}
        for block in self.sides.blocks:
            second |= block.read(leaves, dtype)
        second |= {path: leaves[path].astype(dtype) for path in self._plain(leaves)}
        return 0.0, {
            "first": first,
            "second": {name: jnp.zeros_like(x) for name, x in second.items()},
            "shapes": FactorShapes.of(self.collected.like),
        }

    def _plain(self, leaves: dict[str, Any]) -> tuple[str, ...]:
        """Paths of the leaves that blocks do not cover completely."""
        layers = [block.layer for block in self.sides.blocks]
        return parameters_outside(layers, {path: x.shape for path, x in leaves.items()})

    def momentum_of(self, state: KfeAdamState) -> ArrayTree:
        return state.first

    def check_model(self, state: KfeAdamState) -> None:
        if state.stacks != self.collected.stacks:
            raise ValueError(
                "kfe_adam: the state belongs to another model than like=: make one "
                "with tx.init(params)"
            )
        if state.stacked_average.layers != self.sides.like.layers:
            raise ValueError(
                "kfe_adam: the state was made with another covariance= or max_side=: make a new "
                "one with tx.init(params)"
            )
        remedy = "take like= of value_grad_and_factors with"
        check_storage("kfe_adam", state.stacked_average, self.sides.like, remedy=remedy)

    # ---------------- the update

    def begun(
        self, call: UpdateArguments, numbers: tuple[Any, ...], loss: BatchLoss | None
    ) -> tuple[ArrayTree, KfeAdamState, Any]:
        (rate,) = numbers
        return gradients_only(call.grads), call.state, rate

    def statistics(self, stacked: dict[str, Array], factors: Factors | None) -> Factors | None:
        return self.sides.of_gradient(stacked, factors)

    def waits(self, update: Update) -> Any:
        return update.average.terms == 0 if self.averages_last else None

    def unmoved(self, update: Update) -> Direction:
        state = update.state
        moving = self.collected.stacks.tree(state.first)
        steps = {path: update.stacked[path] for path in moving}
        return Direction(steps, None, (state.first, state.second))

    def direction(
        self, update: Update, unmoved: Direction, refreshed: Callable[[Damping], Any]
    ) -> tuple[Direction, Any]:
        """Adam's steps in the new eigenvectors; the memory is both moments."""
        old_first, old_second = unmoved.memory
        refresh = refreshed(0.0)
        first = jax.tree.map(
            lambda m, g: (
                m
                if isinstance(m, optax.MaskedNode)
                else scaled(self.b1, m) + scaled(1 - self.b1, g.astype(m.dtype))
            ),
            old_first,
            update.gradient,
            is_leaf=lambda x: isinstance(x, optax.MaskedNode),
        )
        moments = update.stacked, self.collected.stacks.tree(first), old_second
        steps, second = self._steps(*moments, refresh[0], update.num_updates)
        return Direction(steps, None, (first, second)), refresh

    def descended(
        self, update: Update, moved: Moved, steps: ArrayTree, *, waits: Any, is_made: Array
    ) -> Descent:
        first, second = moved.direction.memory
        gradient, params = update.gradient, update.call.params
        out = descend(steps, gradient, params, update.numbers, self.weight_decay)
        return Descent(out, moved.others, {"first": first, "second": second})

    def _steps(
        self,
        grads: dict[str, Array],
        first: dict[str, Array],
        second: dict[str, Array],
        bases: Eigenbases,
        num_updates: Int[Array, ""],
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """Adam's steps, before the learning rate, and the new second moments."""
        dtype, steps, moments = self.curvature.like.terms.dtype, dict(first), {}
        count = num_updates.astype(dtype)
        debias_first, debias_second = 1 - self.b1**count, 1 - self.b2**count

        def adam(name: str, g: Array, m: Array) -> Array:
            moments[name] = self.b2 * second[name] + (1 - self.b2) * jnp.square(g)
            return m / debias_first / (jnp.sqrt(moments[name] / debias_second) + self.eps)

        for path in self._plain(first):
            down = adam(path, grads[path].astype(dtype), first[path].astype(dtype))
            steps[path] = down.astype(first[path].dtype)
        for block in self.sides.blocks:
            slopes, steps_of_block = block.read(grads, dtype), {}
            for name, m in block.read(first, dtype).items():
                vectors = block.vectors(bases, name)
                rotated = (into_eigenbasis(x, *vectors) for x in (slopes[name], m))
                steps_of_block[name] = out_of_eigenbasis(adam(name, *rotated), *vectors)
            block.write(steps, steps_of_block)
        return steps, moments
