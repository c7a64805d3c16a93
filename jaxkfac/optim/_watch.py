"""Whether a training goes as it should: counters in the state, and what to do about them."""

import warnings
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from jaxkfac.optim._trees import is_concrete, sum_dtype

PyTree = Any

PATIENCE = 10  # steps in a row with a loss out of bounds, before anything is said


class StateWatch(NamedTuple):
    """What is counted of losses and factors.

    Attributes:
        first_value: The first finite ``value=`` of an update; infinite before.
        diverged: Updates in a row whose ``value=`` was not finite, or above ``first_value + 10 *
            max(abs(first_value), 1)``, int32.
        stale: Refreshes in a row that were due and found no new factors since the one before,
            int32.
        fresh: Whether factors have come since the last refresh.
        outsized: Updates among ``skipped`` whose gradient and factors were finite, but had a sum
            above the square root of the dtype's largest number (1.8e19 in float32), int32.
        restarted: Averages of one factor that were not finite and began anew, int32.
    """

    first_value: Float[Array, ""]
    diverged: Int[Array, ""]
    stale: Int[Array, ""]
    fresh: Bool[Array, ""]
    outsized: Int[Array, ""]
    restarted: Int[Array, ""]

    @classmethod
    def initial(cls, params: PyTree) -> "StateWatch":
        """Before the first update."""
        return cls(
            jnp.full((), jnp.inf, sum_dtype(params)),
            jnp.zeros((), jnp.int32),
            jnp.zeros((), jnp.int32),
            jnp.zeros((), jnp.bool_),
            jnp.zeros((), jnp.int32),
            jnp.zeros((), jnp.int32),
        )

    def after(self, value: ArrayLike | None, *, came: Any, due: Any, begun: Any) -> "StateWatch":
        """After an update.

        Args:
            value: The loss of its batch, where that is known.
            came: Whether there were factors.
            due: Whether a refresh was.
            begun: Whether any factors have come at all.
        """
        fresh = self.fresh | came
        stale = jnp.where(due & begun & ~fresh, self.stale + 1, jnp.where(came, 0, self.stale))
        new = self._replace(stale=stale.astype(jnp.int32), fresh=fresh & ~due)
        if value is None:
            return new
        value = jnp.asarray(value, self.first_value.dtype)
        first = jnp.where(
            jnp.isinf(self.first_value) & jnp.isfinite(value), value, self.first_value
        )
        bound = first + 10 * jnp.maximum(jnp.abs(first), 1)
        beyond = ~jnp.isfinite(value) | (value > bound)
        diverged = jnp.where(beyond, self.diverged + 1, 0).astype(jnp.int32)
        return new._replace(first_value=first, diverged=diverged)

    def counting(self, *, outsized: Any, restarted: Any) -> "StateWatch":
        """With an update whose factors were too large, and the averages that began anew in it."""
        return self._replace(
            outsized=self.outsized + outsized.astype(jnp.int32),
            restarted=self.restarted + restarted,
        )


@runtime_checkable
class Watched(Protocol):
    """The state of an optimizer of ours."""

    @property
    def skipped(self) -> Any: ...
    @property
    def missed(self) -> Any: ...
    @property
    def watch(self) -> StateWatch: ...


_DIVERGED = (
    "{name}: the loss has been above its first value by ten times that, or not finite, for ten "
    "updates or more (state.diverged): begin again with tx.init(params) and {remedy}"
)
_LEFT_OUT = (
    "micro-batches were left out of their groups (state.skipped of jk.multi_steps), because a "
    "gradient or a factor was not finite, or a factor above the square root of the dtype's largest "
    "number: look for NaN in the batches, for examples out of all proportion, and for sums that "
    "overflow in half precision"
)
_SMALLER_RATE = "a learning rate three times smaller"
_ADAPTIVE = (
    "a learning rate three times smaller, a damping ten times larger, or "
    "jk.kfac(like=like), which chooses both"
)
_CAUTIOUS = "jk.LevenbergMarquardt with a larger initial="


def warn_if_diverged(state: Watched, *, stacklevel: int) -> None:
    """Warn at the tenth loss in a row that is out of bounds, where values are known."""
    diverged = state.watch.diverged
    tenth = diverged == PATIENCE  # traced inside shard_map, where the state may be concrete
    if is_concrete(tenth) and tenth:
        warnings.warn(_diverged(state), stacklevel=stacklevel)


def _diverged(state: Any) -> str:
    name = type(state).__name__.removesuffix("State").lower()
    remedy = _ADAPTIVE if name == "kfac" else _SMALLER_RATE
    if getattr(state, "adaptation", ()):
        remedy = _CAUTIOUS
    return _DIVERGED.format(name="kfe_adam" if name == "kfeadam" else name, remedy=remedy)


def check_state(state: PyTree) -> None:
    """Warn, with the remedy, if training goes on and something in the optimizer's state is wrong.

    Call it after a logging interval, outside of ``jit``: it waits for the state's counters, a few
    numbers. Python shows a warning once for each line that calls it.

    Args:
        state: Of :func:`kfac` or :func:`kfe_adam`, or anything with such states inside:
            ``optax.chain``'s, :func:`multi_steps`', a ``TrainState``, an ``nnx.Optimizer``'s.

    Raises:
        ValueError: there is no such state in it, or it is traced.

    Example:
        >>> import jax.numpy as jnp, jaxkfac as jk
        >>> params = {"kernel": jnp.ones((3, 2))}
        >>> objective = jk.Objective(lambda p, x: x @ p["kernel"], jk.Gaussian())
        >>> stats, batch = jk.value_grad_and_factors(objective), (jnp.eye(3), jnp.zeros((3, 2)))
        >>> state = jk.kfac(0.1, like=stats.factor_shapes(params, batch)).init(params)
        >>> jk.check_state(state)
    """
    nodes = jax.tree.leaves(state, is_leaf=_is_watched)
    found = [node for node in nodes if _is_watched(node)]
    if not found:
        raise ValueError(
            "state: there is no state of jk.kfac or jk.kfe_adam in it, expected what "
            "tx.init(params) or tx.update(...) returned"
        )
    groups = [node for node in jax.tree.leaves(state, is_leaf=_accumulates) if _accumulates(node)]
    left_out = [_number(node.skipped) for node in groups]
    if any(x > 0 for x in left_out):
        warnings.warn(_LEFT_OUT, stacklevel=2)
    for node in found:
        for message in _complaints(node):
            warnings.warn(message, stacklevel=2)


def _is_watched(node: Any) -> bool:
    return isinstance(getattr(node, "watch", None), StateWatch)


def _accumulates(node: Any) -> bool:
    """Whether it is the state of ``multi_steps``, which counts what it leaves out by itself."""
    return isinstance(getattr(node, "accumulation", None), optax.MultiStepsState)


def _number(counter: Any) -> Array:
    """A counter's value, in ``nnx.Optimizer`` that of a variable.

    Raises:
        ValueError: it is traced.
    """
    (value,) = jax.tree.leaves(counter)
    if not is_concrete(value):
        raise ValueError("state: its counters are traced; call jk.check_state outside of jit")
    return value


def _complaints(state: Any) -> list[str]:
    counters = {"skipped": state.skipped, "missed": state.missed} | state.watch._asdict()
    counters = {name: _number(x) for name, x in counters.items()}
    adaptation = getattr(state, "adaptation", ()) or None
    rows = (
        (counters["diverged"] >= PATIENCE, _diverged(state)),
        (
            counters["skipped"] > counters["outsized"],
            "updates were skipped (state.skipped), because a gradient or a factor was not finite: "
            "look for NaN in the batches, and for sums that overflow in half precision",
        ),
        (
            counters["outsized"] > 0,
            "updates were skipped because their factors had sums above the square root of the "
            "dtype's largest number (state.watch.outsized): look for examples out of all "
            "proportion, and scale inputs and loss",
        ),
        (
            counters["restarted"] > 0,
            "averages of factors were not finite and began anew (state.watch.restarted): their "
            "curvature is of fewer steps than that of the other layers",
        ),
        (
            counters["missed"] > 1,
            "refreshes were due and no factors had come (state.missed), so that steps were those "
            "of gradient descent: pass factors= at every step, and step= to stats(...) with every=",
        ),
        (
            counters["stale"] > 1,
            "no factors came between the last refreshes (state.watch.stale), so that curvature is "
            "old: pass factors= at every step, or at every k-th with refresh_every a multiple of k",
        ),
        (
            adaptation is not None and _number(adaptation.displaced) > 0,
            "the parameters were not where the last update should have left them "
            "(state.adaptation.displaced): jk.kfac must stand last in optax.chain",
        ),
    )
    return [message for wrong, message in rows if wrong]
