"""The uses that read one parameter in the same way: one group becomes one layer."""

import collections
import dataclasses
import itertools
from collections.abc import Collection, Iterable
from typing import Any

from jaxkfac.interception._axes import AxisTable
from jaxkfac.interception._index import Range, index_name, overlap
from jaxkfac.interception._kind import Kind
from jaxkfac.interception._layer import ParameterMatrix
from jaxkfac.interception._matrices import matrix_of, of_member
from jaxkfac.interception._values import CoverageNote, Use


@dataclasses.dataclass(eq=False)
class UseGroup:
    """The uses that read one parameter the same way.

    ``at`` has them in program order, and of each the iterations whose parameter it is: of a scan
    over a stack of parameters some, else the one. ``computed_from`` are the parameters of a weight
    that is none itself.
    """

    kind: Kind
    weight: ParameterMatrix
    at: dict[Use, list[int]]
    bias: ParameterMatrix | None = None
    name: str = ""
    computed_from: tuple[str, ...] = ()

    @property
    def uses(self) -> list[Use]:
        return list(self.at)


def grouped(
    table: AxisTable,
    uses: Iterable[Use],
    experts: str | None,
    beside: Collection[str] = (),
    without: Collection[tuple[Use, int]] = (),
) -> list[UseGroup]:
    """One group for each way to read a parameter, and of a stack of parameters for each of them.

    ``beside`` are those that have matrices; ``without`` are uses in some iterations that are left
    out.
    """
    found: dict[Any, UseGroup] = {}
    for use in uses:
        weight = matrix_of(table, use, experts, beside)
        for k, view in enumerate(use.view.members or (use.view,)):
            if (use, k) in without:
                continue
            own = of_member(weight, view) if use.view.members else weight
            key = (own, use.kind, use.view.number if use.view.computed_from else None)
            if use.kind.elementwise:
                key = (own.path, own.index, "diagonal")
            new = UseGroup(use.kind, own, {}, computed_from=use.view.computed_from)
            block = found.setdefault(key, new)
            # The slot of a diagonal is beside every part of an array that is this parameter's.
            others = (u for u in block.at if u is not use)
            if not use.kind.elementwise or not any(_same_operand(use, u) for u in others):
                block.at.setdefault(use, []).append(k)
    return list(found.values())


def _same_operand(one: Use, other: Use) -> bool:
    return (one.where, one.operand, one.scope) == (other.where, other.operand, other.scope)


def without_overlaps(blocks: list[UseGroup]) -> tuple[list[UseGroup], list[CoverageNote]]:
    """The blocks without those of parameters whose ranges share elements: each would be a part."""
    found = collections.defaultdict(set)
    for block in blocks:
        for part in (block.weight, block.bias):
            if part is not None:
                found[part.path].add(part.index)
    notes = {}
    for path, indices in found.items():
        for one, other in itertools.combinations(sorted(indices, key=index_name), 2):
            ranged = any(isinstance(at, Range) for at in (*one, *other))
            if ranged and overlap(one, other):
                names = " and ".join(index_name(i) or "[:]" for i in (one, other))
                reason = f"is read through overlapping ranges, {names}, which no one block covers"
                notes[path] = CoverageNote(path, reason, fatal=True)
    kept = [b for b in blocks if b.weight.path not in notes]
    for block in kept:
        if block.bias is not None and block.bias.path in notes:
            block.bias = None
    return kept, list(notes.values())
