"""What a line of the page is, and what a goal."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class Goal:
    """A bound that was set before the measurement.

    Attributes:
        value: What was measured, in the unit of the bound.
        bound: The bound.
        at_least: Whether more is better; else less is.
        unit: As it is written behind the bound.
    """

    value: float
    bound: float
    at_least: bool = False
    unit: str = ""

    @property
    def is_met(self) -> bool:
        """Whether the measurement keeps it, unrounded."""
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.bound:,g}{self.unit}"


@dataclasses.dataclass(frozen=True)
class Row:
    """A line: what was measured, here and beside, and the goal."""

    what: str
    here: str
    beside: str = ""
    goal: Goal | Literal[False] | None = None


@dataclasses.dataclass(frozen=True)
class Section:
    """A record and its lines.

    Attributes:
        title: Its heading.
        record: The file below ``benchmarks/results``, without ``.json``.
        command: What makes the record.
        about: What is compared, in a sentence or two.
        beside: Whose numbers the second column has; ``""`` for no such column.
        rows: The lines of a record.
    """

    title: str
    record: str
    command: str
    about: str
    beside: str
    rows: Callable[[Any], Sequence[Row]]
