"""Rules of the damping: given, adapted to the quadratic model's predictions, or a user's own."""

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from jaxkfac._arguments import ArrayTree
from jaxkfac._errors import at_least_one, scalar
from jaxkfac.blocks import Factors
from jaxkfac.interception import fast_convolutions
from jaxkfac.optim._schedules import at_step
from jaxkfac.optim._trees import is_concrete

Scalar = Float[Array, ""]


class Upcoming(NamedTuple):
    r"""What a rule sees of an update before it.

    Attributes:
        step: Updates so far, int32.
        gradient: The gradient of the parameters that :func:`jaxkfac.kfac` moves, ``{path: leaf}``,
            weight decay included if the quadratic model includes it.
        factors: The factors of this update as it stores them, or ``None`` if none come.
        value: The loss of the batch, or ``None`` if it is not passed.
        curvature: Computes the curvature along the gradient, $g^\top F g / g^\top g$; ``None`` if
            neither the rule nor a rate that is ``"quadratic"`` reads the curvature.
    """

    step: Int[Array, ""]
    gradient: dict[str, Array]
    factors: Factors | None
    value: Any
    curvature: Callable[[], Scalar] | None


class Trial(NamedTuple):
    r"""What a rule sees of an update after it.

    Attributes:
        num_updates: Updates so far, including this one, int32.
        first_damping: $\lambda$ of the first update.
        due: Whether the loss after the update is known and :meth:`DampingRule.is_due`.
        ratio: $\rho$, the change of the loss over that of the model; 1 if it is not known.
        change: The model's change; 0 if it is not known.
        rejected: Whether the step was not made, because of the loss after it or a number that is
            not finite.
        negligible: Whether the model's change is below the rounding of the loss.
    """

    num_updates: Int[Array, ""]
    first_damping: Scalar
    due: Bool[Array, ""]
    ratio: Scalar
    change: Scalar
    rejected: Bool[Array, ""]
    negligible: Bool[Array, ""]


class DampingRule(abc.ABC):
    r"""How the damping $\lambda$ of :func:`jaxkfac.kfac` develops, as ``damping=``.

    A rule is three functions, and a state of its own, a pytree of arrays that it may leave
    ``None``. It holds no arrays itself. :func:`jaxkfac.kfac` calls them inside ``jit``; what they
    return for an update that is skipped, or belongs to the burn-in, is dropped.

    An update needs ``value=``, ``value_fn=`` and ``curvature=`` if the rule ``reads_loss`` or has a
    ``safeguard``, and ``curvature=`` alone if the model chooses rate or momentum.

    Attributes:
        reads_loss: Whether :meth:`after` needs the loss after the update.
        every: Updates between two of which the loss after the update is compared with the model.
        safeguard: Whether a step that raises the loss of its batch is rejected.
        burn_in: Updates at the beginning that average the factors and move nothing.
        factor_every: Updates between two trials of the factors' own damping; 0: they have none.
        minimum: The smallest damping of the factors that follows from such a trial.
    """

    reads_loss: ClassVar[bool] = False
    every: int = 5
    safeguard: bool = False
    burn_in: int = 0
    factor_every: int = 0
    minimum: float = 0.0

    @abc.abstractmethod
    def begin(self, params: ArrayTree) -> tuple[ArrayLike, Any]:
        r"""The first $\lambda$, and the rule's state before the first update.

        Args:
            params: The parameters, arrays or their shapes.
        """

    def before(self, damping: Scalar, state: Any, upcoming: Upcoming) -> tuple[ArrayLike, Any]:
        r"""$\lambda$ of an update, and the rule's state; by default both stay as they are.

        Args:
            damping: $\lambda$ as the last update left it.
            state: The rule's state.
            upcoming: The update.
        """
        return damping, state

    def after(self, damping: Scalar, state: Any, trial: Trial) -> tuple[ArrayLike, Any]:
        r"""$\lambda$ after an update, and the rule's state; by default both stay as they are.

        Args:
            damping: $\lambda$ of the update.
            state: The rule's state.
            trial: The outcome of the update.
        """
        return damping, state

    def is_due(
        self, damping: Scalar, first_damping: Scalar, num_updates: Int[Array, ""]
    ) -> Bool[Array, ""]:
        """Whether the loss after an update is compared with the model.

        Args:
            damping: The damping of the update.
            first_damping: The damping of the first update.
            num_updates: Updates so far, including this one.
        """
        return num_updates % self.every == 0

    def factor_dampings(self, damping: Scalar) -> Float[Array, " k"]:
        """The factors' damping, and after it others with which a trial compares it.

        Read only if ``factor_every`` is not 0.
        """
        return damping[None]


@dataclasses.dataclass(frozen=True)
class GivenDamping(DampingRule):
    """A number, or a schedule of the step."""

    number: Any

    def begin(self, params: ArrayTree) -> tuple[ArrayLike, Any]:
        return at_step(self.number, jnp.zeros((), jnp.int32)), None

    def before(self, damping: Scalar, state: Any, upcoming: Upcoming) -> tuple[ArrayLike, Any]:
        return at_step(self.number, upcoming.step), state

    def after(self, damping: Scalar, state: Any, trial: Trial) -> tuple[ArrayLike, Any]:
        return at_step(self.number, trial.num_updates), state


# ---------------- the rule of Levenberg and Marquardt


_GOOD, _BAD = 0.75, 0.25
_INITIAL = 0.03
# 0.03 is 6e-5 to 0.26 times the curvature along the first gradient on the twelve problems of
# benchmarks/optimizers; outside of these shares the first damping follows the curvature.
_LEAST_SHARE, _LARGEST_SHARE = 1e-5, 1.0
_EARLY = 20  # updates at the beginning that all adapt the damping
_RAISE = 4.0  # factor of the damping after a rejected step
_LARGEST_RISE = 1e12  # of the damping over its first value


@dataclasses.dataclass(frozen=True)
class LevenbergMarquardt(DampingRule):
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

    reads_loss: ClassVar[bool] = True
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

    def factor_dampings(self, damping: Scalar) -> Float[Array, " 3"]:
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

    def begin(self, params: ArrayTree) -> tuple[ArrayLike, Any]:
        return self.initial_number, None

    def before(self, damping: Scalar, state: Any, upcoming: Upcoming) -> tuple[ArrayLike, Any]:
        step, curvature = upcoming.step, upcoming.curvature
        if self.initial != "auto" or curvature is None or (is_concrete(step) and step > 0):
            return damping, state

        def first_damping() -> Scalar:
            return self.initial_at(curvature()).astype(damping.dtype)

        first = fast_convolutions(first_damping)
        return jax.lax.cond(step == 0, first, lambda: damping), state

    def is_due(
        self, damping: Scalar, first_damping: Scalar, num_updates: Int[Array, ""]
    ) -> Bool[Array, ""]:
        due = num_updates % self.every == 0
        if self.safeguard:
            due |= (num_updates <= _EARLY) | (damping > first_damping)
        return due

    def after(self, damping: Scalar, state: Any, trial: Trial) -> tuple[ArrayLike, Any]:
        change, rejected, smaller = trial.change, trial.rejected, self.factor**self.every
        smaller = jnp.asarray(smaller, damping.dtype)
        good = trial.due & ~rejected & (trial.ratio > _GOOD) & (change < 0)
        # A step that the model itself finds uphill is bad.
        bad = rejected | (trial.due & (change != 0) & ((trial.ratio < _BAD) | (change > 0)))
        new = jnp.where(bad, damping / smaller, jnp.where(good, damping * smaller, damping))
        if self.safeguard:
            # A smaller step than one that changes nothing cannot help.
            rises = jnp.where(rejected, damping * _RAISE, new)
            largest = trial.first_damping * _LARGEST_RISE
            rises = jnp.where(trial.negligible, damping, jnp.minimum(rises, largest))
            new = jnp.where(bad, jnp.maximum(damping, rises), new)
        return jnp.clip(new, self.minimum, self.maximum), state
