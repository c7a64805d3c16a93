"""What the analysis of a program has found so far."""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from jaxkfac.interception._axes import Atoms, AxisTable
from jaxkfac.interception._compat import Eqn, is_stateful
from jaxkfac.interception._constant_rows import Meeting
from jaxkfac.interception._propagate import Axes
from jaxkfac.interception._values import (
    CoverageNote,
    Derived,
    Parameter,
    Value,
    View,
    traced_indices_in,
    views_in,
)


class Facts:
    """Value numbers, axis atoms and findings.

    Attributes:
        table: The axis atoms.
        findings: What the coverage report says beside the uses.
        reads: Paths of the parameters that some equation reads.
        data_axes: Axes of the data arguments.
        scanned: For each scan, the axes of data that it runs over (``lax.map``); for each branch,
            none.
        lengths: For each scan, its number of iterations.
        parameters: The parameters as they are given, by path.
        computed: The weights that are computed from parameters, by number and scans.
        of_constants: The parameters that a constant without the examples times, by path, in words.
        stopped: By the number of a constant, the parameter whose gradient was stopped.
        meetings: By its place, each equation in which products of constants meet data.
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
        """The number of a value that is equal to no other."""
        return self.number(object())

    def number(self, key: Hashable) -> int:
        """One number for each key."""
        return self._numbers.setdefault(key, len(self._numbers))

    def equation_number(self, eqn: Eqn, ins: Sequence[Value], result: int = 0) -> int:
        """The number of a result: the same for the same equation of the same values.

        An equation whose parameters cannot be hashed is compared with none, and a stateful one (a
        mutable array that is read again) has another result each time.
        """
        if is_stateful(eqn):
            return self.unique()
        numbers = tuple(v.number for v in ins)
        try:
            return self.number((eqn.primitive.name, _frozen(eqn.params), numbers, result))
        except TypeError:
            return self.unique()

    def report(self, value: Value, reason: str, *, fatal: bool = True) -> None:
        """Say something of the parameters that a value is made of; nothing of other values."""
        for view in views_in(value):
            if view.rowless:  # what leads to no use has lost its examples, whatever reads it
                lost = f"has the example axis lost at `{view.rowless}`"
                self.findings[CoverageNote(view.path, lost, True)] = None
            else:
                self.findings[CoverageNote(view.path, reason, fatal)] = None
        for path, first in getattr(value, "reasons", ()):
            text = f"goes through {first} and {reason}" if fatal else reason
            self.findings[CoverageNote(path, text, fatal)] = None

    def outside(self, value: Value, eqn: Eqn) -> Value:
        """A value that leaves a structured equation: there it is no longer followed as a view."""
        if views_in(value):
            reasons = reasons_of([value], f"`{eqn.primitive.name}`")
            return Derived(self.unique(), reasons, traced_indices_in([value]))
        return value

    def arrangement(self, eqn: Eqn, view: View, ins: Sequence[Value], result: int = 0) -> int:
        """The number of the arrangement that an equation makes of a view's elements."""
        others = [v for v in ins if not isinstance(v, Parameter)]
        return self.equation_number(
            eqn, [dataclasses.replace(view, number=view.elements), *others], result
        )


def reasons_of(values: Sequence[Value], this: str) -> tuple[tuple[str, str], ...]:
    """What each parameter went through first: this equation, or an earlier one; in words."""
    reasons: dict[str, str] = {}
    for value in values:
        for view in views_in(value):
            first = view.function or view.lost_by
            for path in (view.path, *(member.path for member in view.members)):
                reasons.setdefault(path, f"`{first}`" if first else this)
        reasons |= getattr(value, "reasons", ())
    return tuple(sorted(reasons.items()))


def _frozen(params: Mapping[str, Any]) -> Hashable:
    items = tuple(sorted(params.items(), key=lambda kv: kv[0]))
    hash(items)
    return items
