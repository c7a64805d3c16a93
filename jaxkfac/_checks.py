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
