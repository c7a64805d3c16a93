"""Counters that show whether a training goes well, and the warnings that follow from them."""

import dataclasses
import math
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from jaxkfac._arguments import ArrayTree
from jaxkfac.blocks import (
    Factors,
    Side,
    Sides,
    arrays_of_turn,
    over_stack,
    with_arrays_of_turn,
    without_turn,
)
from jaxkfac.optim._mapped_update import has_device_axis, on_first_device, parted_leaves
from jaxkfac.optim._trees import is_concrete, sum_dtype

# ---------------- whether factors come when they are needed


def check_factors_have_come(missed: ArrayLike, *seen: Factors | None) -> None:
    """Refuse to continue as gradient descent if factors are collected and never arrive.

    Args:
        missed: Refreshes that were due without any factors; ignored if traced.
        seen: Where factors may be: the average, and the factors of this call.

    Raises:
        ValueError: two refreshes were missed and there is still no factor; names the remedy.
    """
    counts = [factors.terms for factors in seen if factors is not None]
    if not all(is_concrete(x) for x in (missed, *counts)):
        return
    if missed > 1 and not any(counts):
        raise ValueError(
            f"kfac: {missed} refreshes were due, and no factors have come so far: the steps at "
            "which they are collected (every=) and those at which kfac gets them do not meet. "
            "Pass stats(..., step=) a number that counts from 0, and accumulate with "
            "jk.multi_steps, which adds up the factors of all micro-batches"
        )


def check_measured_between(every: ArrayLike, *, measures: bool) -> None:
    """Refuse eigenvalues measured in eigenvectors that no step uses again.

    Raises:
        ValueError: every step is a refresh; names the remedy.
    """
    if measures and not isinstance(every, Tracer) and every == 1:
        raise ValueError(
            "the factors hold eigenvalues measured in the eigenvectors at hand (bases=), and "
            "refresh_every=1 replaces these at every step, before they are used: take "
            "refresh_every=2 or more"
        )


# ---------------- averages that overflow


def is_in_range(factors: Factors | None) -> Bool[Array, ""]:
    """Whether no sum is above the square root of the largest number, 1.8e19 in float32.

    Preconditioning multiplies two such sums, and their product is finite; so is an average of 1e19
    of them. No entry of a second moment exceeds the largest entry of its diagonal, so only
    diagonals are read. NaN is out of range.
    """
    flags = []
    for x in () if factors is None else _diagonals(jax.lax.stop_gradient(factors)):
        # float16 would have a bound of 256; but sums never run in float16.
        dtype = jnp.float32 if x.dtype.itemsize < 4 else x.dtype
        bound = math.sqrt(float(jnp.finfo(dtype).max))
        flags.append((x.astype(dtype) <= bound).all())
    return jnp.stack(flags).all() if flags else jnp.asarray(True)


def begun_anew(average: Factors, new: Factors) -> tuple[Factors, Int[Array, ""]]:
    """Replace averages that are not finite by a step's factors; also return how many there were.

    Infinity stays infinite whatever is added, and its layer would never be decomposed again. An
    A restarts with the sums and counts of ``new``. A G shares its count with other layers, so it
    restarts with the mean of ``new`` multiplied by this count. If ``new`` has no rows or terms, the
    average stays until some come. Where factors come in turns, G is a mean, and only the arrays of
    this turn can restart.
    """
    if new.turn is not None and average.turn is not None:
        arrays = dataclasses.replace(
            without_turn(arrays_of_turn(average, new)), terms=jnp.ones_like(average.terms)
        )
        arrays, number = begun_anew(arrays, without_turn(new))
        arrays = dataclasses.replace(arrays, turn=average.turn.of_layers(()))
        return with_arrays_of_turn(average, arrays, new.turn), number
    restarted, has_terms = [jnp.zeros((), jnp.int32)], new.terms > 0
    weight = average.terms / jnp.where(has_terms, new.terms.astype(average.terms.dtype), 1)
    sides: Sides = {}
    for place, old in average.sides.items():
        fresh, is_finite = new.side(place), jnp.isfinite(jax.lax.stop_gradient(old.diagonal))
        if place.table == "diagonals":  # entry by entry
            bad = ~is_finite & has_terms
            restarted.append(bad.any().astype(jnp.int32))
        else:
            bad = ~is_finite.all(-1) & (fresh.count > 0)
            restarted.append(bad.sum(dtype=jnp.int32))
        data, count = fresh.data.astype(old.data.dtype), old.count
        if place.table == "a":
            count = jnp.where(bad, fresh.count.astype(count.dtype), count)
        else:
            data = data * weight.astype(data.dtype)
        data = jnp.where(over_stack(bad, old.data), data, old.data)
        sides[place] = Side(data, count, old.is_matrix)
    return average.with_sides(sides), sum(restarted[1:], restarted[0])


def _diagonals(factors: Factors) -> Iterator[Array]:
    """The diagonals of dense factors, and all other sums unchanged."""
    yield from (side.diagonal for side in factors.sides.values())
    if factors.corrections is not None:
        yield from factors.corrections.sums.values()
        yield from factors.corrections.bias_sums.values()


# ---------------- the watch over losses and factors


PATIENCE = 10  # steps in a row with a loss out of bounds before a warning


class StateWatch(NamedTuple):
    """Counters of losses and factors.

    Attributes:
        first_value: The first finite ``value=`` of an update; infinite before it.
        diverged: Updates in a row whose ``value=`` was not finite, or above ``first_value + 10 *
            max(abs(first_value), 1)``, int32.
        stale: Refreshes in a row that were due and found no new factors since the previous one,
            int32.
        fresh: Whether factors have come since the last refresh.
        outsized: Updates among ``skipped`` whose gradient and factors were finite, but had a sum
            above the square root of the dtype's largest number (1.8e19 in float32), int32.
        restarted: Averages of one factor that were not finite and restarted, int32.
    """

    first_value: Float[Array, ""]
    diverged: Int[Array, ""]
    stale: Int[Array, ""]
    fresh: Bool[Array, ""]
    outsized: Int[Array, ""]
    restarted: Int[Array, ""]

    @classmethod
    def initial(cls, params: ArrayTree) -> "StateWatch":
        """Before the first update."""
        return cls(
            jnp.full((), jnp.inf, sum_dtype(params)),
            jnp.zeros((), jnp.int32),
            jnp.zeros((), jnp.int32),
            jnp.zeros((), jnp.bool_),
            jnp.zeros((), jnp.int32),
            jnp.zeros((), jnp.int32),
        )

    def after(
        self, value: ArrayLike | None, *, came: ArrayLike, due: ArrayLike, begun: ArrayLike
    ) -> "StateWatch":
        """The counters after an update.

        Args:
            value: The loss of its batch, if known.
            came: Whether there were factors.
            due: Whether a refresh was due.
            begun: Whether any factors have come so far.
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

    def counting(self, *, outsized: Array, restarted: Array) -> "StateWatch":
        """Count an update with factors that were too large, and the averages that restarted."""
        return self._replace(
            outsized=self.outsized + outsized.astype(jnp.int32),
            restarted=self.restarted + restarted,
        )


@runtime_checkable
class Watched(Protocol):
    """The state of one of this library's optimizers."""

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
_PROBABILITIES = (
    "the outputs of ten steps or more looked like probabilities (state.probabilities), and the "
    "likelihood expects logits: return the values before the softmax or sigmoid"
)
_SMALLER_RATE = "a learning rate three times smaller"
_ADAPTIVE = (
    "jk.kfac(like=like), which chooses rate and damping, or jk.kfac(0.1, like=like) with the "
    "default damping and norm constraint; if that is what you have, a learning rate three times "
    "smaller"
)
_MORE_DAMPING = (
    "jk.spring(learning_rate='search', damping='adaptive') for residuals, the default; a learning "
    "rate three times smaller, or ten times the damping, for scores"
)
_SAFEGUARDED = (
    "damping=jk.LevenbergMarquardt(), the default, which makes no step that raises the loss of "
    "its batch; if that is what you have, larger batches or jk.kfe_adam(0.01, like=like)"
)


def warn_if_diverged(state: Watched, *, stacklevel: int) -> None:
    """Warn at the tenth loss in a row that is out of bounds, if values are concrete."""
    diverged = state.watch.diverged
    tenth = diverged == PATIENCE  # traced inside shard_map, where the state may be concrete
    if is_concrete(tenth) and tenth:
        warnings.warn(_diverged(state), stacklevel=stacklevel)


def _diverged(state: object) -> str:
    name = type(state).__name__.removesuffix("State").lower()
    remedy = _ADAPTIVE if name == "kfac" else _SMALLER_RATE
    if getattr(state, "adaptation", ()):
        remedy = _SAFEGUARDED
    if name == "spring":
        remedy = _MORE_DAMPING
    return _DIVERGED.format(name="kfe_adam" if name == "kfeadam" else name, remedy=remedy)


def check_state(state: object) -> None:
    """Warn, with the remedy, if something in the optimizer's state is wrong.

    Call it after a logging interval, outside ``jit``; it waits for the state's counters, a few
    numbers. Python shows each warning once for each line that calls it.

    If several devices hold the state (of ``jax.pmap``, with its axis of devices, or replicated),
    their copies are compared, and a warning names an array that differs.

    Args:
        state: State of :func:`kfac`, :func:`kfe_adam` or :func:`spring`, or anything that contains
            such states: a state of ``optax.chain`` or :func:`multi_steps`, a ``TrainState``, an
            ``nnx.Optimizer``.

    Raises:
        ValueError: it contains no such state, or it is traced, or of several models (``vmap``).

    Memory:
        Copies are compared in main memory, one array at a time, and at most 16 MiB of each.

    Example:
        >>> import jax.numpy as jnp, jaxkfac as jk
        >>> params = {"kernel": jnp.ones((3, 2))}
        >>> objective = jk.Objective(lambda p, x: x @ p["kernel"], jk.Gaussian())
        >>> stats, batch = jk.value_grad_and_factors(objective), (jnp.eye(3), jnp.zeros((3, 2)))
        >>> state = jk.kfac(0.1, like=stats.factor_shapes(params, batch)).init(params)
        >>> jk.check_state(state)
    """
    nodes = jax.tree_util.tree_leaves_with_path(state, is_leaf=_is_watched)
    paths = [jax.tree_util.keystr(path) for path, node in nodes if _is_watched(node)]
    watched = [node for _, node in nodes if _is_watched(node)]
    trained = [x for x in jax.tree.leaves(state, is_leaf=_is_trained) if _is_trained(x)]
    if not (watched or trained):
        raise ValueError(
            "state: there is no state of jk.kfac, jk.kfe_adam, jk.spring or jk.Optimizer in it, "
            "expected what tx.init(params) or tx.update(...) returned"
        )
    groups = [node for node in jax.tree.leaves(state, is_leaf=_accumulates) if _accumulates(node)]
    left_out = [_number(node.skipped) for node in groups]
    if any(x > 0 for x in left_out):
        warnings.warn(_LEFT_OUT, stacklevel=2)
    if any(_number(node.probabilities) >= PATIENCE for node in trained):
        warnings.warn(_PROBABILITIES, stacklevel=2)
    for path, node in zip(paths, watched, strict=True):
        for message in (*_complaints(node), *_parted(path, node)):
            warnings.warn(message, stacklevel=2)


def _is_watched(node: object) -> bool:
    return isinstance(getattr(node, "watch", None), StateWatch)


def _is_trained(node: object) -> bool:
    """Whether it is the state of ``Optimizer``, whose transformation may be one of optax."""
    return hasattr(node, "model_state") and hasattr(node, "inner")


def _accumulates(node: object) -> bool:
    """Whether it is the state of ``multi_steps``, which counts left-out batches itself."""
    return isinstance(getattr(node, "accumulation", None), optax.MultiStepsState)


def _number(counter: ArrayTree) -> Any:
    """A counter's value; in ``nnx.Optimizer`` the counter is a variable.

    Raises:
        ValueError: it is traced, or the state is of several models.
    """
    (value,) = jax.tree.leaves(counter)
    if not is_concrete(value):
        raise ValueError("state: its counters are traced; call jk.check_state outside of jit")
    if has_device_axis(value):
        value = on_first_device(value)
    if value.shape:
        raise ValueError(
            f"state: its counters have shape {value.shape}, as under jax.vmap: check the state of "
            "one model at a time, jax.tree.map(lambda x: x[i], state)"
        )
    return value


def _parted(path: str, state: Any) -> list[str]:
    """What is wrong if the devices that hold a state do not hold the same one."""
    (counter,) = jax.tree.leaves(state.skipped)
    apart = parted_leaves(state, device_axis=has_device_axis(counter))
    if not apart:
        return []
    more = f" and of {len(apart) - 1} more arrays" if len(apart) > 1 else ""
    return [
        f"devices hold different values of state{path}{apart[0]}{more}, so each has taken steps of "
        "its own: give jk.value_grad_and_factors or jk.Optimizer the mapped axis as axis_name=, "
        "and begin again with a state and parameters that are equal on all devices (states of "
        "several models, one on each device, are checked one at a time)"
    ]


def _complaints(state: Any) -> list[str]:
    counters = {"skipped": state.skipped, "missed": state.missed} | state.watch._asdict()
    counters = {name: _number(x) for name, x in counters.items()}
    adaptation = getattr(state, "adaptation", ()) or None
    average = getattr(state, "stacked_average", None)  # jk.spring has none
    turn = getattr(average, "turn", None)
    mixed = (
        ", or the micro-batches of an update were of different groups (collect=): give them one "
        "step="
    )
    averaged = 0 if turn is None else _number(turn.number)
    filling = turn is not None and averaged >= 3 * turn.of
    rows = (
        (counters["diverged"] >= PATIENCE, _diverged(state)),
        (
            counters["skipped"] > counters["outsized"],
            "updates were skipped (state.skipped), because a gradient or a factor was not finite: "
            "look for NaN in the batches, and for sums that overflow in half precision"
            + ("" if turn is None else mixed),
        ),
        (
            filling and average is not None and _number(average.terms) == 0,
            f"the factors of {averaged} steps were averaged, and some groups of collect= have "
            "never come, so that no parameter has changed: pass stats(..., step=) the number of "
            "each call of your loop, which counts from 0 (state.step stays 0 until every group has "
            "come)",
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
            "curvature is from fewer steps than in the other layers",
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
        (
            adaptation is not None and _number(adaptation.disagreed) >= PATIENCE,
            "the loss rose after steps too small to change it (state.adaptation.disagreed), so "
            "value= and value_fn= are different losses, and the steps were not made: pass "
            "stats(...) and stats.adaptation(...) the same batch, key and state",
        ),
    )
    return [message for wrong, message in rows if wrong]
