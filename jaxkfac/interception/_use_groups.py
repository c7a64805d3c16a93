"""Groups of the uses that read one parameter in the same way; each group becomes one layer."""

import collections
import dataclasses
import itertools
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any

from jaxkfac.interception._kind import Kind, Use
from jaxkfac.interception._layer import ParameterMatrix
from jaxkfac.interception.values._axes import Atoms, AxisTable
from jaxkfac.interception.values._index import Range, index_name, overlap, own_atoms, pieces_of
from jaxkfac.interception.values._values import CoverageNote, View

# ---------------- the parameter of a use as a matrix


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
        axis_positions = [where[a] for a in own_axis(axis)]
        if size == 1 and not axis_positions:  # a scanned axis of length one has no atoms
            axis_positions = [len(atoms)]
            atoms.append(1)
        stack += axis_positions
        stacked.update(axis_positions)
    inputs = {where[a] for axis in use.axes.inputs for a in own_axis(axis)}
    # A free axis that is read as experts is part of the stack, and no output any more.
    outputs = {where[a] for axis in use.axes.outputs for a in own_axis(axis)} - stacked
    if use.kind.elementwise:
        outputs = set(range(len(sizes))) - stacked
    return ParameterMatrix(
        view.source.path,
        view.source.index,
        tuple(atoms),
        tuple(stack),
        # In the parameter's own order, so that uses that contract axes in another order have equal
        # matrices.
        tuple(sorted(inputs)),
        tuple(sorted(outputs)),
    )


def of_member(matrix: ParameterMatrix, view: View) -> ParameterMatrix:
    """The matrix of one of a stack of parameters, from the matrix of the first."""
    return dataclasses.replace(matrix, path=view.source.path, index=view.source.index)


def _of_elements(view: View, beside: Collection[str]) -> View:
    """The view whose elements a diagonal covers.

    That is the full parameter. If the parameter also has matrices (``beside``), it is the range
    that the view sees.
    """
    ranged = any(isinstance(at, Range) for at in view.source.index)
    if view.source.members or (ranged and view.source.path in beside):
        return view
    source = view.source._replace(index=())
    if ranged:
        source = source._replace(origin=source.uncut, consumed=())
    return dataclasses.replace(view, source=source)


def atom_positions(table: AxisTable, view: View) -> tuple[dict[int, int], tuple[int, ...]]:
    """The position and size of each atom of the (indexed) parameter."""
    atoms = [a for axis in view.source.remaining_axes for a in table.atoms(axis)]
    return {a: i for i, a in enumerate(atoms)}, tuple(table.size(a) for a in atoms)


def own_axes(table: AxisTable, view: View) -> Callable[[Atoms], Atoms]:
    """A function from an axis of a view to the parameter's own atoms."""
    pieces = pieces_of(table, view.joins) or {}
    return lambda axis: own_atoms(table, pieces, axis)


def stack_of(use: Use, experts: str | None) -> tuple[tuple[int, Atoms], ...]:
    """Size and atoms of the stacked axes of a use in slot order; size 0 means: take the atoms'."""
    steps = [(c.size, c.atoms) for c in use.view.source.consumed]
    steps += [(0, axis) for axis in use.axes.stack]
    if reads_experts(use, experts):
        steps.append((0, use.axes.outputs[0]))
    return tuple(steps)


def reads_experts(use: Use, experts: str | None) -> bool:
    """Whether the first free axis is a stack, according to the caller's pattern."""
    # With a single free axis there would be no outputs left beside the experts.
    if not experts or not use.kind.reads.experts or use.axes.stack or len(use.axes.outputs) < 2:
        return False
    return re.fullmatch(experts, use.view.source.path) is not None


# ---------------- groups


@dataclasses.dataclass(eq=False)
class UseGroup:
    """The uses that read one parameter in the same way.

    Attributes:
        kind: Their kind.
        weight: The matrix that they read.
        at: The uses in program order, each with the iterations that read this parameter: some of a
            scan over a stack of parameters, else the one.
        bias: The bias that is joined to them.
        name: Name of the layer.
        computed_from: For a weight that is no parameter itself, the parameters behind it.
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
    """One group for each way to read a parameter, and for each parameter of a stack.

    ``beside`` are the parameters that have matrices; ``without`` are uses, each in one iteration,
    to leave out.
    """
    groups: dict[Any, UseGroup] = {}
    for use in uses:
        weight = matrix_of(table, use, experts, beside)
        for k, view in enumerate(use.view.source.members or (use.view,)):
            if (use, k) in without:
                continue
            member_weight = of_member(weight, view) if use.view.source.members else weight
            # Two weights computed from one parameter have equal paths, and only the value tells
            # them apart.
            key = (
                member_weight,
                use.kind,
                use.view.number if use.view.source.computed_from else None,
            )
            if use.kind.elementwise:
                # One diagonal for each parameter: an element is divided by one number, whatever
                # kinds of equations read it.
                key = (member_weight.path, member_weight.index, "diagonal")
            new = UseGroup(use.kind, member_weight, {}, computed_from=use.view.source.computed_from)
            block = groups.setdefault(key, new)
            # One use of a diagonal stands for all parts of an array that belong to its parameter:
            # its slot covers them all.
            earlier = (u for u in block.at if u is not use)
            if not use.kind.elementwise or not any(_same_operand(use, u) for u in earlier):
                block.at.setdefault(use, []).append(k)
    return list(groups.values())


def _same_operand(first: Use, second: Use) -> bool:
    one, other = first.at, second.at
    return (one.operand, one.scope) == (other.operand, other.scope)


def without_overlaps(blocks: list[UseGroup]) -> tuple[list[UseGroup], list[CoverageNote]]:
    """The blocks without parameters whose ranges share elements: no block would cover them."""
    indices_by_path = collections.defaultdict(set)
    for block in blocks:
        for matrix in (block.weight, block.bias):
            if matrix is not None:
                indices_by_path[matrix.path].add(matrix.index)
    notes = {}
    for path, indices in indices_by_path.items():
        for first, second in itertools.combinations(sorted(indices, key=index_name), 2):
            ranged = any(isinstance(at, Range) for at in (*first, *second))
            if ranged and overlap(first, second):
                names = " and ".join(index_name(i) or "[:]" for i in (first, second))
                reason = f"is read through overlapping ranges, {names}, which no one block covers"
                notes[path] = CoverageNote(path, reason, fatal=True)
    covered = [b for b in blocks if b.weight.path not in notes]
    for block in covered:
        # Its weight keeps its block; only the bias is not covered.
        if block.bias is not None and block.bias.path in notes:
            block.bias = None
    return covered, list(notes.values())


def scanned_by(uses: list[Use]) -> tuple[str, int] | None:
    """The one scan over the leading stacked axis of a layer, or ``None``."""
    if any(u.view.source.members for u in uses):  # each iteration belongs to another layer
        return None
    indices = {
        u.view.source.consumed[0].traced_index if u.view.source.consumed else ("none", 0)
        for u in uses
    }
    (scan, *further) = indices
    return scan if not further and scan[0] == "scan" else None
