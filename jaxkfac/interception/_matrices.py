"""The parameter of a use as a matrix: its stack, its inputs and its outputs."""

import dataclasses
import re
from collections.abc import Callable, Collection

from jaxkfac.interception._axes import Atoms, AxisTable
from jaxkfac.interception._index import Range
from jaxkfac.interception._joins import own_atoms, pieces_of
from jaxkfac.interception._layer import ParameterMatrix
from jaxkfac.interception._values import Use, View


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
