"""The plan that the analysis leaves: what is special about the equations of a program."""

import dataclasses
from typing import Any

from jax.typing import ArrayLike

from jaxkfac.interception._compat import Jaxpr
from jaxkfac.interception._propagate import Axes
from jaxkfac.interception._values import Use

MARK_ROWS = "jaxkfac_mark_rows"


@dataclasses.dataclass(eq=False)
class Mark:
    """A call of ``mark_rows``: the axes its mask speaks of."""

    axes: Axes


@dataclasses.dataclass(eq=False)
class Plan:
    """One jaxpr in one calling context, and what is special about its equations.

    Attributes:
        jaxpr: The jaxpr.
        consts: Its constants.
        uses: Position of an equation -> the layer uses in it.
        views: Position of a view -> the traced index that it takes along a stack, if any.
        choices: Position of a view for some rows -> its axes along which the rows run.
        lookups: Positions of the views of which each row picks its own entry of a stack.
        marks: Position of a ``mark_rows`` -> what it marks.
        entries: Of a scan's body: position of an operand of the scan -> the use that a parameter is
            there, as the state that the first iteration starts from.
        calls: Position of a structured equation -> the plan of its body.
        exports_views: Whether a result of the jaxpr is a view of a parameter.
        scan: The identity of the scan whose body it is, or 0.
        steps: The plan as the rewriter runs it, made by the rewriter once.
    """

    jaxpr: Jaxpr
    consts: list[ArrayLike]
    uses: dict[int, list[Use]] = dataclasses.field(default_factory=dict)
    views: dict[int, tuple[str, int] | None] = dataclasses.field(default_factory=dict)
    choices: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    lookups: set[int] = dataclasses.field(default_factory=set)
    marks: dict[int, Mark] = dataclasses.field(default_factory=dict)
    entries: dict[int, Use] = dataclasses.field(default_factory=dict)
    calls: dict[int, "Plan"] = dataclasses.field(default_factory=dict)
    exports_views: bool = False
    scan: int = 0
    steps: list[Any] | None = None

    def all_uses(self) -> list[Use]:
        """Every use, in program order."""
        found = list(self.entries.values())
        for position in sorted(self.uses.keys() | self.calls.keys()):
            found += self.uses.get(position, [])
            found += self.calls[position].all_uses() if position in self.calls else []
        return found

    def all_marks(self) -> list[Mark]:
        inner = [m for plan in self.calls.values() for m in plan.all_marks()]
        return list(self.marks.values()) + inner
