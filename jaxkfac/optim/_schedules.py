"""The numbers of an optimizer, which may be schedules or traced values."""

import math
from collections.abc import Callable
from typing import Any

from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array

from jaxkfac._errors import at_least_one, scalar
from jaxkfac.curvature import Eigenbases, Inverses
from jaxkfac.linalg.spectral import check_clipping, check_damping

# ---------------- schedules


Schedule = Callable[[Any], Any]


def check_learning_rate(learning_rate: Any) -> None:
    """Refuse a negative learning rate, or one that is not finite, if its value is concrete."""
    if callable(learning_rate) or isinstance(learning_rate, Tracer):
        return
    scalar("learning_rate", learning_rate, "a number or a schedule")
    if not 0 <= float(learning_rate) < math.inf:
        raise ValueError(f"learning_rate must be finite, zero or positive, got {learning_rate}")


def check_scheduled_damping(damping: Any, mode: str) -> None:
    """Refuse an unknown mode, and a negative damping unless it is a schedule."""
    if callable(damping):
        damping = 0.0
    elif isinstance(damping, tuple):
        damping = tuple(0.0 if callable(number) else number for number in damping)
    for number in damping if isinstance(damping, tuple) else (damping,):
        scalar("damping", number, "a number or a schedule, 0.0 for no damping, or a pair of them")
    check_damping(damping, mode)


def at_step(value: Any, step: Array) -> Any:
    """The value at ``step`` of a schedule, or of each entry of a pair; numbers are unchanged."""
    if isinstance(value, tuple):
        return tuple(at_step(entry, step) for entry in value)
    return value(step) if callable(value) else value


def has_schedule(value: object) -> bool:
    """Whether the value, or one of a pair, is a schedule."""
    return any(map(callable, value if isinstance(value, tuple) else (value,)))


# ---------------- traced numbers, as ``optax.inject_hyperparams`` passes them


Clipping = dict[str, Any]


def check_numbers(
    *, refresh_every: Any, momentum: Any, norm_constraint: Any, weight_decay: Any
) -> None:
    """Refuse what is no number, and numbers out of range if their values are concrete."""
    _number("refresh_every", refresh_every, "a number of steps, at least 1")
    _number("momentum", momentum, "a number in [0, 1), 0.0 for no momentum")
    if norm_constraint is not None:
        _number("norm_constraint", norm_constraint, "a positive number, or None for no constraint")
    if not isinstance(refresh_every, Tracer):
        at_least_one(refresh_every=refresh_every)
    if not isinstance(momentum, Tracer) and not 0 <= momentum < 1:
        raise ValueError(f"momentum must be in [0, 1), got {momentum}")
    is_concrete = not isinstance(norm_constraint, Tracer)
    if is_concrete and norm_constraint is not None and not norm_constraint > 0:
        raise ValueError(f"norm_constraint must be positive or None, got {norm_constraint}")
    check_weight_decay(weight_decay)


def check_auto(**options: Any) -> None:
    """Refuse words other than ``"auto"`` in the place of a number."""
    for name, option in options.items():
        if isinstance(option, str) and option != "auto":
            raise ValueError(f'{name}={option!r}: expected a number, or "auto"')


def or_auto(choice: Any, automatic: Any) -> Any:
    """What ``"auto"`` stands for in its place; any other choice as it is."""
    return automatic if isinstance(choice, str) and choice == "auto" else choice


def check_weight_decay(weight_decay: Any) -> None:
    """Refuse what is no number, and a negative number if its value is concrete."""
    _number("weight_decay", weight_decay, "a number, 0.0 for no weight decay")
    if not isinstance(weight_decay, Tracer) and not weight_decay >= 0:
        raise ValueError(f"weight_decay must be zero or positive, got {weight_decay}")


def _number(name: str, value: object, expected: str) -> None:
    if callable(value):
        raise TypeError(
            f"{name}: expected {expected}, got a function: only learning_rate and damping take "
            "schedules; optax.inject_hyperparams(jk.kfac) reads one for any other number"
        )
    scalar(name, value, expected)


def may_be_positive(number: ArrayLike) -> bool:
    """Whether a number may be positive: it is traced, or not zero."""
    return isinstance(number, Tracer) or bool(number)


def known_clipping(max_condition: Any, floor: Any) -> Clipping | None:
    """The settings of clipping in the form that bases store; ``None`` if they are traced."""
    if isinstance(max_condition, Tracer) or isinstance(floor, Tracer):
        return None
    scalar("max_condition", max_condition, "a number, at least 1")
    scalar("floor", floor, "a number, 0.0 for no floor")
    settings = {"max_condition": float(max_condition), "floor": float(floor)}
    check_clipping(**settings)
    return settings


def clipping_of_init(clipping: Clipping | None) -> Clipping:
    """The settings of clipping that the first bases store.

    Raises:
        TypeError: they are traced, because ``init`` was called inside ``jit``.
    """
    if clipping is None:
        raise TypeError(
            "kfac: max_condition and floor are part of the state's structure, and are traced "
            "here; write optax.inject_hyperparams(jk.kfac, static_args=('max_condition', "
            "'floor')), or call init outside of jit"
        )
    return clipping


def clipping_of(bases: Eigenbases | Inverses, clipping: Clipping | None) -> Clipping:
    """The settings of a state's bases, checked against the transformation's.

    Raises:
        ValueError: the state was made with other settings.
    """
    stored = {"max_condition": bases.max_condition, "floor": bases.floor}
    if clipping is not None and clipping != stored:
        raise ValueError(
            f"kfac: the state was made with {_text(stored)}, and this transformation has "
            f"{_text(clipping)}: make a new state with tx.init(params)"
        )
    return stored


def _text(clipping: Clipping) -> str:
    return ", ".join(f"{name}={value}" for name, value in clipping.items())
