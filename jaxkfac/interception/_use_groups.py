"""The uses that read one parameter in the same way: one group becomes one layer."""

import collections
import dataclasses
import itertools
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any

from jaxkfac.interception._axes import Atoms, AxisTable
from jaxkfac.interception._index import Range, index_name, overlap, own_atoms, pieces_of
from jaxkfac.interception._kind import Kind, Use
from jaxkfac.interception._layer import ParameterMatrix
from jaxkfac.interception._values import CoverageNote, View

# ---------------- the parameter of a use as a matrix: its stack, its inputs and its outputs


def matrix_of(
    table: AxisTable, use: Use, experts: str | None, beside: Collection[str]
) -> ParameterMatrix:
    """The matrix that a use reads, or the elements that its diagonal covers."""
    if use.kind.elementwise:
        use = dataclasses.replace(use, view=_of_elements(use.view, beside))
    view = use.view
    own_axis = own_axes(table, view)
    where, sizes = atom_positions(table, view)
    atoms = list(sizes)
    stack: list[int] = []
    stacked: set[int] = set()
    for size, axis in stack_of(use, experts):
        own = [where[a] for a in own_axis(axis)]
        if size == 1 and not own:  # a scanned axis of length one has no atoms
            own = [len(atoms)]
            atoms.append(1)
        stack += own
        stacked.update(own)
    inputs = {where[a] for axis in use.in_axes for a in own_axis(axis)}
    outputs = {where[a] for axis in use.out_axes for a in own_axis(axis)} - stacked
    if use.kind.elementwise:
        outputs = set(range(len(sizes))) - stacked
    return ParameterMatrix(
        view.path,
        view.index,
        tuple(atoms),
        tuple(stack),
        tuple(sorted(inputs)),
        tuple(sorted(outputs)),
    )


def of_member(matrix: ParameterMatrix, view: View) -> ParameterMatrix:
    """The matrix that one of a stack of parameters is, from that of the first."""
    return dataclasses.replace(matrix, path=view.path, index=view.index)


def _of_elements(view: View, beside: Collection[str]) -> View:
    """The view whose elements a diagonal covers.

    It is all of the parameter, unless there are matrices in it ``beside``: then it is its range.
    """
    ranged = any(isinstance(at, Range) for at in view.index)
    if view.members or (ranged and view.path in beside):
        return view
    if not ranged:
        return dataclasses.replace(view, index=())
    return dataclasses.replace(view, index=(), origin=view.uncut, consumed=())


def atom_positions(table: AxisTable, view: View) -> tuple[dict[int, int], tuple[int, ...]]:
    """Atom -> position, and the atoms' sizes, of the (indexed) parameter."""
    atoms = [a for axis in view.own for a in table.atoms(axis)]
    return {a: i for i, a in enumerate(atoms)}, tuple(table.size(a) for a in atoms)


def own_axes(table: AxisTable, view: View) -> Callable[[Atoms], Atoms]:
    """From an axis of a view to the parameter's own atoms."""
    pieces = pieces_of(table, view.joins) or {}
    return lambda axis: own_atoms(table, pieces, axis)


def stack_of(use: Use, experts: str | None) -> tuple[tuple[int, Atoms], ...]:
    """Size and atoms of the stacked axes of a use, in slot order; size 0: from the atoms."""
    steps = [(c.size, c.atoms) for c in use.view.consumed]
    steps += [(0, axis) for axis in use.batch_axes]
    if reads_experts(use, experts):
        steps.append((0, use.out_axes[0]))
    return tuple(steps)


def reads_experts(use: Use, experts: str | None) -> bool:
    """Whether the first free axis is a stack, as the caller's pattern says."""
    if not experts or not use.kind.stacks_outputs or use.batch_axes or len(use.out_axes) < 2:
        return False
    return re.fullmatch(experts, use.view.path) is not None


# ----------------


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


def scanned_by(uses: list[Use]) -> tuple[str, int] | None:
    """The one scan over the leading stacked axis of a layer, if there is one."""
    if any(u.view.members for u in uses):  # an iteration is another layer's
        return None
    found = {u.view.consumed[0].traced_index if u.view.consumed else ("none", 0) for u in uses}
    (scan, *others) = found
    return scan if not others and scan[0] == "scan" else None
