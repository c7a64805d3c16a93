"""Arguments that are refused by name."""

from collections.abc import Sequence
from typing import Any


def one_of(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Refuse a value that is none of the choices."""
    if value not in choices:
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(repr, choices))}")


def at_least_one(**numbers: int) -> None:
    """Refuse a number below one, by its name."""
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name}={number}: expected at least 1")


def instance_of(name: str, value: Any, kind: type, remedy: str) -> None:
    """Refuse a value of another type, and say where one of the right type comes from."""
    if not isinstance(value, kind):
        raise TypeError(f"{name}: expected {kind.__name__}, {remedy}, got {named(value)}")


def named(value: Any) -> str:
    """What a value is, in a few words."""
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
