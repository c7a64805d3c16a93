"""The records of an analysis: facts about values, and the plan of what to do with each equation."""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from jax.typing import ArrayLike

from jaxkfac._interpreter import Segment, steps_of, with_shared_runs
from jaxkfac._jaxpr_compat import Eqn, Jaxpr, bodies_of, is_stateful
from jaxkfac.interception._constant_rows import Meeting
from jaxkfac.interception._kind import Use, Value
from jaxkfac.interception.values._axes import Atoms, Axes, AxisTable
from jaxkfac.interception.values._values import (
    CoverageNote,
    Derived,
    Parameter,
    View,
    traced_indices_in,
    views_in,
)

# ---------------- facts about the values of a program


class Facts:
    """Value numbers, axis atoms and findings of an analysis.

    Attributes:
        table: The axis atoms.
        findings: Notes of the coverage report besides the uses, as the keys of a dictionary.
        reads: Paths of the parameters that some equation reads.
        data_axes: Axes of the data arguments.
        scanned: For each scan, the axes of data that it runs over (``lax.map``); empty for a
            branch.
        lengths: For each scan, its number of iterations.
        parameters: The view of each parameter as an argument, by path.
        computed: The weights that are computed from parameters, by number and scans.
        of_constants: Parameters multiplied by a constant that does not depend on the examples: a
            note in words, by path.
        stopped: Parameters whose gradient was stopped, by the number of the resulting constant.
        meetings: Equations in which products of constants meet data, by their place.
        closed_in: Products of constants whose results enter an equation that is not followed.
    """

    def __init__(self) -> None:
        self.table = AxisTable()
        self.findings: dict[CoverageNote, None] = {}
        self.reads: set[str] = set()
        self.data_axes: list[Axes] = []
        self.scanned: dict[int, Atoms] = {}
        self.lengths: dict[int, int] = {}
        self.parameters: dict[str, View] = {}
        self.computed: dict[Hashable, View] = {}
        self.of_constants: dict[str, str] = {}
        self.meetings: dict[Hashable, Meeting] = {}
        self.closed_in: set[Hashable] = set()
        self.stopped: dict[int, View] = {}
        self._numbers: dict[Hashable, int] = {}

    def unique(self) -> int:
        """A number for a value that is equal to no other."""
        return self.number(object())

    def number(self, key: Hashable) -> int:
        """The number of a key; equal keys have equal numbers."""
        return self._numbers.setdefault(key, len(self._numbers))

    def equation_number(self, eqn: Eqn, ins: Sequence[Value], result: int = 0) -> int:
        """The number of a result; the same equation of the same values gives the same number.

        An equation whose parameters cannot be hashed gets a new number, and a stateful one (a
        mutable array that is read again) gets a new number each time.
        """
        if is_stateful(eqn):
            return self.unique()
        numbers = tuple(v.number for v in ins)
        try:
            return self.number((eqn.primitive.name, _frozen(eqn.params), numbers, result))
        except TypeError:
            return self.unique()  # parameters without a hash: the equation equals no other

    def report(self, value: Value, reason: str, *, fatal: bool = True) -> None:
        """Note a reason for each parameter in a value; values without parameters add nothing."""
        for view in views_in(value):
            if (
                view.history.rowless
            ):  # a view that leads to no use has lost its examples, whoever reads it
                lost = f"has the example axis lost at `{view.history.rowless}`"
                self.findings[CoverageNote(view.source.path, lost, True)] = None
            else:
                self.findings[CoverageNote(view.source.path, reason, fatal)] = None
        for path, first in getattr(value, "reasons", ()):
            text = f"goes through {first} and {reason}" if fatal else reason
            self.findings[CoverageNote(path, text, fatal)] = None

    def outside(self, value: Value, eqn: Eqn) -> Value:
        """A value that leaves a structured equation, outside which it is not followed as a view."""
        if views_in(value):
            reasons = reasons_of([value], f"`{eqn.primitive.name}`")
            return Derived(self.unique(), reasons, traced_indices_in([value]))
        return value

    def arrangement(self, eqn: Eqn, view: View, ins: Sequence[Value], result: int = 0) -> int:
        """The number of the arrangement that an equation gives to a view's elements."""
        operands = [v for v in ins if not isinstance(v, Parameter)]
        arranged = dataclasses.replace(view, number=view.arrangement)
        return self.equation_number(eqn, [arranged, *operands], result)


def reasons_of(values: Sequence[Value], this: str) -> tuple[tuple[str, str], ...]:
    """What each parameter went through first, in words: an earlier equation, or this one."""
    reasons: dict[str, str] = {}
    for value in values:
        for view in views_in(value):
            first = view.history.function or view.history.lost_by
            for path in (view.source.path, *(member.source.path for member in view.source.members)):
                reasons.setdefault(path, f"`{first}`" if first else this)
        reasons |= getattr(value, "reasons", ())
    return tuple(sorted(reasons.items()))


def _frozen(params: Mapping[str, Any]) -> Hashable:
    items = tuple(sorted(params.items(), key=lambda kv: kv[0]))
    hash(items)  # raises a TypeError, which `equation_number` expects
    return items


# ---------------- the plan


MARK_ROWS = "jaxkfac_mark_rows"


@dataclasses.dataclass(eq=False)
class Mark:
    """A call of ``mark_rows``: the axes that its mask covers, and the value number of the mask."""

    axes: Axes
    mask: int


@dataclasses.dataclass(eq=False)
class Plan:
    """One jaxpr in one calling context, and the equations that need special treatment.

    Attributes:
        jaxpr: The jaxpr.
        consts: Its constants.
        uses: By position of an equation, the layer uses in it.
        views: By position of a view, the traced index by which it selects an entry of a stack, or
            ``None``.
        choices: By position of a view that applies to some rows only, its axes that are rows.
        lookups: Positions of the views in which each row picks its own entry of a stack.
        marks: By position of a ``mark_rows``, what it marks.
        entries: For a scan's body, by position of an operand of the scan, the use of a parameter
            as the state that the first iteration starts from.
        calls: By position of a structured equation, the plan of its body.
        exports_views: Whether a result of the jaxpr is a view of a parameter.
        scan: The identity of the scan whose body it is, or 0.
        steps: The plan in the form that the rewriter runs, computed once by the rewriter.
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
    steps: list[Segment | int] | None = None

    def all_uses(self) -> list[Use]:
        """Every use, in program order."""
        uses = list(self.entries.values())
        for position in sorted(self.uses.keys() | self.calls.keys()):
            uses += self.uses.get(position, [])
            uses += self.calls[position].all_uses() if position in self.calls else []
        return uses

    def replace_uses(self, new: Mapping[Use, Use]) -> None:
        """Put other uses in the place of some, here and in the bodies."""
        self.entries = {k: new.get(use, use) for k, use in self.entries.items()}
        self.uses = {k: [new.get(use, use) for use in uses] for k, uses in self.uses.items()}
        for plan in self.calls.values():
            plan.replace_uses(new)

    def bodies(self, position: int) -> list["Plan"]:
        """The plans of the bodies of a structured equation: of a cond one for each branch."""
        inner = self.calls[position]
        several = len(bodies_of(self.jaxpr.eqns[position])) > 1
        return [inner.calls[k] for k in sorted(inner.calls)] if several else [inner]

    def all_marks(self) -> list[Mark]:
        inner = [m for plan in self.calls.values() for m in plan.all_marks()]
        return list(self.marks.values()) + inner


def plan_steps(plan: Plan, encoded: frozenset[str]) -> list[Segment | int]:
    """The plan as runs of ordinary equations and positions of special ones; computed once."""
    if plan.steps is None:

        def is_special(use: Use) -> bool:
            return use.layer is not None or use.view.source.path in encoded

        special = {p for p, uses in plan.uses.items() if any(map(is_special, uses))}
        special |= plan.views.keys() | plan.marks.keys()
        special |= {
            p
            for p, c in plan.calls.items()
            if c.exports_views or any(map(is_special, c.all_uses()))
        }
        steps = steps_of(plan.jaxpr, lambda position, _: position in special)
        plan.steps = with_shared_runs(steps)
    return plan.steps
