"""The quadratic model of the loss, and a damping that adapts to the model's predictions."""

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxkfac._errors import at_least_one, scalar
from jaxkfac.curvature.operators import Operator
from jaxkfac.linalg import inner_product

# ---------------- the quadratic model and its minimum


Leaves = dict[str, Array]
Scalar = Float[Array, ""]


def dot(x_leaves: Leaves, y_leaves: Leaves, dtype: DTypeLike) -> Scalar:
    """The inner product of two trees with the same paths."""
    return inner_product(list(x_leaves.values()), [y_leaves[path] for path in x_leaves], dtype)


class QuadraticModel(NamedTuple):
    r"""$M(d) = \nabla h^\top d + \tfrac12 d^\top (F + \lambda) d$, the predicted change of $h$.

    Attributes:
        gradient: $\nabla h$ of the leaves that move, by path.
        curvature: $F$ of these leaves, and perhaps of others.
        damping: $\lambda$, plus the weight decay if $h$ includes it.
    """

    gradient: Leaves
    curvature: Operator
    damping: Scalar

    def along(self, *directions: Leaves) -> tuple[Float[Array, "k k"], Float[Array, " k"]]:
        """The model's second and first derivatives in the coefficients of some directions.

        Raises:
            ValueError: the curvature lacks a leaf of the directions.
        """
        dtype = self.damping.dtype
        curved = self.curvature.inner_products([self._vector(d) for d in directions])
        norms = [jnp.stack([dot(x, y, dtype) for y in directions]) for x in directions]
        slopes = jnp.stack([dot(self.gradient, d, dtype) for d in directions])
        return curved.astype(dtype) + self.damping * jnp.stack(norms), slopes

    def _vector(self, direction: Leaves) -> Leaves:
        """A direction in the operator's form, zero on leaves that do not move."""
        if self.curvature.like is None:
            return direction
        shapes = self.curvature.leaves
        for path in direction:
            if path not in shapes:
                raise ValueError(
                    f"curvature: the operator has no leaf {path!r}, which kfac moves: build it of "
                    "the same parameters, jk.operators.ggn(objective, params, batch)"
                )
        return {
            p: direction[p] if p in direction else jnp.zeros(s.shape, s.dtype)
            for p, s in shapes.items()
        }


class Minimum(NamedTuple):
    """Coefficients of the step and of the last update, and the model's change there."""

    rate: Scalar
    momentum: Scalar
    change: Scalar


def minimum(
    second: Float[Array, "k k"],
    first: Float[Array, " k"],
    rate: Scalar | None,
    momentum: Scalar | None,
    *,
    bound: float = math.inf,
) -> Minimum:
    """Minimize the model over the step and, as second direction, the last update.

    Args:
        second: Second derivatives of the model in the coefficients.
        first: First derivatives.
        rate: The step's coefficient, if it is given.
        momentum: The last update's coefficient, if it is given.
        bound: Largest absolute value of a chosen momentum.

    Returns:
        The coefficients; zero for a direction that is zero, as the last update is before the first
        step, and for a last update that is parallel to the step.
    """
    if len(first) == 1:
        second, first = jnp.pad(second, (0, 1)), jnp.pad(first, (0, 1))
    (a, b), c = second[0], second[1, 1]
    p, q = first
    # Not ``> 0``: NaN has to propagate, so that the update is rejected.
    some, last = ~(a == 0), ~(c == 0)
    if rate is not None:
        along, more = rate, jnp.where(last, -(q + rate * b) / jnp.where(last, c, 1), 0)
        more = jnp.clip(more, -bound, bound)
    elif momentum is not None:
        along, more = jnp.where(some, -(p + momentum * b) / jnp.where(some, a, 1), 0), momentum
    else:
        # In unit directions, because the last update may be shorter by many orders.
        u, v = jnp.sqrt(jnp.where(some, a, 1)), jnp.sqrt(jnp.where(last, c, 1))
        cosine, p_u, q_v = b / (u * v), p / u, q / v
        independent = 1 - cosine * cosine
        both = some & last & ~(independent <= 8 * jnp.finfo(first.dtype).eps)
        sine = jnp.where(both, independent, 1)
        along = jnp.where(both, (cosine * q_v - p_u) / sine, -p_u) / u
        more = jnp.where(both, (cosine * p_u - q_v) / sine, jnp.where(some, 0, -q_v)) / v
        # At a bounded momentum the step's coefficient is the minimum along the step.
        free, more = more, jnp.clip(more, -bound, bound)
        along = jnp.where((more != free) & some, -(p + more * b) / jnp.where(some, a, 1), along)
    at = jnp.stack([along, more])
    curved = (at[:, None] * second * at).sum()
    return Minimum(along, more, (at * first).sum() + curved / 2)


# ---------------- the damping rule of Levenberg and Marquardt


_GOOD, _BAD = 0.75, 0.25
_INITIAL = 0.03
# 0.03 is 6e-5 to 0.26 times the curvature along the first gradient on the twelve problems of
# benchmarks/optimizers; outside of these shares the first damping follows the curvature.
_LEAST_SHARE, _LARGEST_SHARE = 1e-5, 1.0
_EARLY = 20  # updates at the beginning that all adapt the damping
_RAISE = 4.0  # factor of the damping after a rejected step
_LARGEST_RISE = 1e12  # of the damping over its first value


@dataclasses.dataclass(frozen=True)
class LevenbergMarquardt:
    r"""Damping that :func:`jaxkfac.kfac` adapts to the quadratic model's predictions.

    At every ``every``-th update, with $d$ the update from $\theta$ and $M$ the model's change of
    the loss $h$,

    $$ \rho = \frac{h(\theta + d) - h(\theta)}{M(d)}, \qquad
       \lambda \leftarrow \begin{cases}
         \omega^T \lambda & \rho > \tfrac34, \\
         \omega^{-T} \lambda & \rho < \tfrac14,
       \end{cases} $$

    where $\omega$ is the ``factor`` and $T$ is ``every``.

    The model may be wrong by many orders of magnitude: where outputs are saturated, it predicts a
    larger decrease than the loss itself. The ``safeguard`` therefore makes it a trust-region
    method. The loss is evaluated at every update, on the same batch. A step that raises it by more
    than rounding, or after which it is not finite, is not made: $\lambda$ is multiplied by 4, and
    the next step begins without momentum. $\lambda$ is adapted at each of the first 20 updates and
    at each update as long as it is above its first value. A momentum that the model chooses is at
    most 1 in absolute value. $\lambda$ does not rise where the predicted change is below the
    rounding of the loss, nor above $10^{12}$ times its first value.

    Attributes:
        initial: $\lambda$ at the first update, positive; added to the curvature of the mean loss,
            in units of its squared gradient. ``"auto"``: 0.03, but at least $10^{-5}$ times and at
            most 1 times the curvature along the first gradient, $g^\top F g / g^\top g$.
        every: $T$, updates from one adaptation to the next, at least 1.
        factor: $\omega \in (0, 1)$.
        minimum: $\lambda$ never falls below it.
        maximum: $\lambda$ never rises above it.
        factor_every: Updates between two trials of the factors' own damping $\gamma^2$, rounded to
            refreshes. It begins at $\lambda + w$, and between trials it keeps its ratio to it. A
            trial compares the steps with $\gamma^2$, $\omega^{T'} \gamma^2$ and
            $\omega^{-T'} \gamma^2$ ($T'$ is ``factor_every``), and keeps the damping whose step has
            the least model value. 0: the factors are damped by $\lambda + w$.
        burn_in: Updates at the beginning that average the factors and move nothing.
        safeguard: Whether steps that raise the loss are rejected. ``False`` is the paper's rule:
            the loss is evaluated every ``every`` updates, and only a step after which it is not
            finite is rejected, which counts as $\rho < \tfrac14$.

    Raises:
        TypeError: an argument is not a number.
        ValueError: a number out of its range, bounds that cross, or ``initial`` outside of them.

    Example:
        >>> import jaxkfac as jk
        >>> damping = jk.LevenbergMarquardt(initial=10.0, every=5)
        >>> print(round(damping.factor**damping.every, 3))
        0.774

    References:
        Martens and Grosse, Optimizing neural networks with Kronecker-factored approximate
        curvature, 2015, sections 6.5 and 6.6.
    """

    initial: float | Literal["auto"] = "auto"
    every: int = 5
    factor: float = 19 / 20
    minimum: float = 1e-8
    maximum: float = math.inf
    burn_in: int = 0
    factor_every: int = 20
    safeguard: bool = True

    def __post_init__(self) -> None:
        at_least_one(every=self.every)
        if isinstance(self.initial, str) and self.initial != "auto":
            raise ValueError(f'initial={self.initial!r}: expected a positive number or "auto"')
        numbers = ("factor", "minimum", "maximum", "burn_in", "factor_every")
        for name in numbers if self.initial == "auto" else ("initial", *numbers):
            scalar(name, getattr(self, name), "a number")
            if isinstance(getattr(self, name), Tracer):
                raise TypeError(f"{name} is traced: LevenbergMarquardt takes numbers of Python's")
        if not 0 < self.factor < 1:
            raise ValueError(f"factor={self.factor}: expected a number between 0 and 1")
        if not 0 <= self.minimum <= self.maximum:
            raise ValueError(
                f"minimum={self.minimum} and maximum={self.maximum}: expected bounds of the "
                "damping with 0 <= minimum <= maximum"
            )
        if self.initial != "auto" and not (
            0 < self.initial < math.inf and self.minimum <= self.initial <= self.maximum
        ):
            raise ValueError(
                f"initial={self.initial}: expected a positive damping from minimum={self.minimum} "
                f"to maximum={self.maximum}"
            )
        for name in ("burn_in", "factor_every"):
            number = getattr(self, name)
            if number < 0 or number != int(number):
                raise ValueError(f"{name}={number}: expected a number of updates, 0 for none")

    def factor_dampings(self, damping: Float[Array, ""]) -> Float[Array, " 3"]:
        """The factors' damping and its two neighbors, which a trial compares."""
        step = self.factor**self.factor_every
        return jnp.clip(damping * jnp.asarray([1, step, 1 / step], damping.dtype), self.minimum)

    @property
    def initial_number(self) -> float:
        """The first damping where nothing is known of the curvature."""
        if self.initial != "auto":
            return self.initial
        return min(max(_INITIAL, self.minimum), self.maximum)

    def initial_at(self, curvature: Float[Array, ""]) -> Float[Array, ""]:
        """The first damping, for the curvature along the first gradient."""
        if self.initial != "auto":
            return jnp.asarray(self.initial, curvature.dtype)
        # A gradient of zero has no curvature along it.
        some = jnp.isfinite(curvature) & (curvature > 0)
        first = jnp.clip(_INITIAL, _LEAST_SHARE * curvature, _LARGEST_SHARE * curvature)
        return jnp.clip(jnp.where(some, first, _INITIAL), self.minimum, self.maximum)

    def is_due(
        self, damping: Float[Array, ""], first: Float[Array, ""], num_updates: Int[Array, ""]
    ) -> Bool[Array, ""]:
        """Whether an update adapts the damping.

        Args:
            damping: The damping of the update.
            first: The damping of the first update.
            num_updates: Updates so far, including this one.
        """
        due = num_updates % self.every == 0
        if self.safeguard:
            due |= (num_updates <= _EARLY) | (damping > first)
        return due

    def adapted(
        self,
        damping: Float[Array, ""],
        ratio: Float[Array, ""],
        change: Float[Array, ""],
        *,
        due: Bool[Array, ""],
        rejected: Bool[Array, ""],
        negligible: Bool[Array, ""],
        first: Float[Array, ""],
    ) -> Float[Array, ""]:
        """The damping after an update.

        Args:
            damping: The damping of the update.
            ratio: The ratio of the trial.
            change: The model's change; a step that the model itself finds uphill is bad.
            due: Whether the update adapts the damping; its loss has then been evaluated.
            rejected: Whether the step was not made.
            negligible: Whether the model's change is below the rounding of the loss.
            first: The damping of the first update.
        """
        smaller = jnp.asarray(self.factor**self.every, damping.dtype)
        good = due & ~rejected & (ratio > _GOOD) & (change < 0)
        bad = rejected | (due & (change != 0) & ((ratio < _BAD) | (change > 0)))
        new = jnp.where(bad, damping / smaller, jnp.where(good, damping * smaller, damping))
        if self.safeguard:
            # A smaller step than one that changes nothing cannot help.
            rises = jnp.where(rejected, damping * _RAISE, new)
            rises = jnp.where(negligible, damping, jnp.minimum(rises, first * _LARGEST_RISE))
            new = jnp.where(bad, jnp.maximum(damping, rises), new)
        return jnp.clip(new, self.minimum, self.maximum)


def initial_damping(damping: Any) -> Any:
    """The damping at the first step: that of a rule, or the number itself."""
    return damping.initial_number if isinstance(damping, LevenbergMarquardt) else damping
