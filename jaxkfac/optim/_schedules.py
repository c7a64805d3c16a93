"""Numbers that may be schedules: checked when built where known, read at a step."""

import math
from collections.abc import Callable
from typing import Any

from jax.core import Tracer
from jaxtyping import Array

from jaxkfac._checks import scalar
from jaxkfac.linalg import check_damping

Schedule = Callable[[Any], Any]


def check_learning_rate(learning_rate: Any) -> None:
    """Refuse a negative learning rate, or one that is not finite, where its value is known."""
    if callable(learning_rate) or isinstance(learning_rate, Tracer):
        return
    scalar("learning_rate", learning_rate, "a number or a schedule")
    if not 0 <= float(learning_rate) < math.inf:
        raise ValueError(f"learning_rate must be finite, zero or positive, got {learning_rate}")


def check_scheduled_damping(damping: Any, mode: str) -> None:
    """Refuse an unknown mode, and a negative damping where it is no schedule."""
    if callable(damping):
        damping = 0.0
    elif isinstance(damping, tuple):
        damping = tuple(0.0 if callable(part) else part for part in damping)
    for part in damping if isinstance(damping, tuple) else (damping,):
        scalar("damping", part, "a number or a schedule, 0.0 for no damping, or a pair of them")
    check_damping(damping, mode)


def at_step(value: Any, step: Array) -> Any:
    """The value of a schedule, or of each of a pair, at ``step``; numbers as they are."""
    if isinstance(value, tuple):
        return tuple(at_step(part, step) for part in value)
    return value(step) if callable(value) else value


def has_schedule(value: Any) -> bool:
    """Whether the value, or one of a pair, changes with the step."""
    return any(map(callable, value if isinstance(value, tuple) else (value,)))
