"""Layer uses grouped into layers: names, orientation, shared inputs."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

from jaxkfac.interception._axes import AxisTable
from jaxkfac.interception._index import index_name
from jaxkfac.interception._joined_biases import join_biases
from jaxkfac.interception._joins import cuts_of, pieces_of
from jaxkfac.interception._layer import Layer
from jaxkfac.interception._matrices import atom_positions, own_axes, reads_experts
from jaxkfac.interception._table import selector
from jaxkfac.interception._use_groups import UseGroup, grouped, without_overlaps
from jaxkfac.interception._values import CoverageNote, Use


def group_uses(
    table: AxisTable,
    uses: Sequence[Use],
    *,
    max_dense: int,
    experts: str | None = None,
    pattern: str | None = None,
    scale_blocks: bool = False,
) -> tuple[list[Layer], list[CoverageNote]]:
    """Group uses into layers, and mark every use with the layer it belongs to.

    Args:
        table: The axis atoms of the analysis.
        uses: Every use, in program order. Their ``layer`` is set.
        max_dense: A larger side is kept as a diagonal.
        experts: Full-match pattern of parameters whose free leading axis is a stack.
        pattern: Full-match pattern over layer names; the others are left untapped.
        scale_blocks: Whether scales and lone biases have a dense block.

    Returns:
        The layers in program order, and notes for the coverage report.

    Raises:
        UnknownLayerError: ``pattern`` matches no layer.
    """
    # A second pass squares the whole gradient of a parameter, whatever else reads it.
    whole = {u.view.path for u in uses if not u.kind.covered}
    uses = [u for u in uses if not (u.kind.elementwise and u.kind.covered and u.view.path in whole)]
    matrices = [u for u in uses if not u.kind.elementwise]
    biases = [u for u in uses if u.kind.inserts]
    others = [u for u in uses if u.kind.elementwise and not u.kind.inserts]
    blocks = grouped(table, matrices, experts)
    joined = join_biases(table, blocks, biases, others, experts)
    beside = {part.path for b in blocks for part in (b.weight, b.bias) if part}
    elementwise = [u for u in uses if u.kind.elementwise]
    blocks += grouped(table, elementwise, experts, beside, joined)
    order = {u: i for i, u in enumerate(uses)}
    blocks.sort(key=lambda b: order[b.uses[0]])
    blocks, notes = without_overlaps(blocks)
    notes += _name(table, blocks) + _looked_up_matrices(table, blocks)
    selected = selector(pattern, [b.name for b in blocks])
    for block in blocks:
        masked = next((u.view.masked for u in block.uses if u.view.masked), "")
        if masked and not block.kind.elementwise:
            reason = f"is masked by a constant in `{masked}`; its factors are those of the product"
            notes.append(CoverageNote(block.weight.path, reason, fatal=False))
        if not block.kind.covered:
            reason = "has a diagonal of whole examples' gradients, from a second pass"
            notes.append(CoverageNote(block.weight.path, reason, fatal=False))
        if any(u.whole_examples for u in block.uses):
            reason = "has a diagonal of whole examples' gradients: a weight is formed for each"
            notes.append(CoverageNote(block.weight.path, reason, fatal=False))
        if block.name not in selected:
            notes.append(CoverageNote(block.weight.path, "is left out by layers=", fatal=False))
    blocks = [b for b in blocks if b.name in selected]
    owners = _owners(table, blocks)
    with_ones = {id(owners[id(b)]) for b in blocks if b.bias is not None}
    layers = []
    names: dict[Use, dict[int, str]] = collections.defaultdict(dict)
    for block in blocks:
        owner = owners[id(block)]
        for use, iterations in block.at.items():
            names[use].update(dict.fromkeys(iterations, block.name))
            use.free_stack = reads_experts(use, experts)
        ones = id(owner) in with_ones
        elementwise, diagonal = block.kind.elementwise, block.kind.diagonal_inputs
        n_in, n_out = block.weight.in_features, block.weight.out_features
        layers.append(
            Layer(
                name=block.name,
                kind=block.kind.name,
                weight=block.weight,
                bias=block.bias,
                in_features=n_in,
                out_features=n_out,
                stack=block.weight.stack_shape,
                uses=len(block.uses),
                input=owner.name,
                a_dense=not elementwise and not diagonal and n_in + ones <= max_dense,
                g_dense=_is_dense(block, n_out, max_dense, scale_blocks=scale_blocks),
                computed_from=block.computed_from,
            )
        )
    for use, of_iteration in names.items():
        number = len(use.view.members) or 1
        use.layers = tuple(of_iteration.get(k) for k in range(number))
        use.layer = next(name for name in use.layers if name is not None)
    return layers, notes


def _is_dense(block: UseGroup, size: int, max_dense: int, *, scale_blocks: bool) -> bool:
    """Whether the output side, or the block of an elementwise kind, is a matrix."""
    if size > max_dense or not block.kind.covered:
        return False
    return scale_blocks or not block.kind.elementwise


def _name(table: AxisTable, blocks: list[UseGroup]) -> list[CoverageNote]:
    """Name every block; where a parameter has several, the dense one keeps the path.

    Of a kernel that is read in both orientations it is the one with a bias, or that contracts its
    first axes.
    """
    notes, by_path = [], collections.defaultdict(list)
    for block in blocks:
        by_path[block.weight.path + index_name(block.weight.index)].append(block)
    for path, group in by_path.items():
        taken: set[str] = set()
        for block in sorted(group, key=lambda b: _precedence(table, b)):
            further = path if block.computed_from else f"{path}@{block.kind.suffix}"
            name = path if not taken else further
            while name in taken:
                name += "'"
            taken.add(name)
            block.name = name
            if block.computed_from:
                block.weight = dataclasses.replace(block.weight, path=name)
        if len(group) > 1 and not group[0].computed_from:
            names = ", ".join(sorted(taken))
            turned = any(_are_turned(*pair) for pair in itertools.combinations(group, 2))
            taken_by = " and its transpose, as one product" if turned else ""
            reason = f"has {len(group)} blocks: {names}; the optimizer uses {path!r}{taken_by}"
            notes.append(CoverageNote(group[0].weight.path, reason, fatal=False))
    return notes


def _precedence(table: AxisTable, block: UseGroup) -> tuple[Any, ...]:
    """What the blocks of a parameter are sorted by; nothing in it depends on the program's order.

    An axis of size one is neither an input nor an output: it belongs to the side that has no other.
    """
    weight, view = block.weight, block.uses[0].view
    where, _ = atom_positions(table, view)
    axes = [{where[a] for a in table.atoms(axis)} for axis in view.own]
    single = [d for d, axis in enumerate(axes) if not axis][-1:]  # behind those of a stack
    inputs, outputs = (
        ([d for d, axis in enumerate(axes) if axis & set(side)] or single, side)
        for side in (weight.inputs, weight.outputs)
    )
    return block.kind.rank, block.bias is None, inputs > outputs, weight.inputs, weight.outputs


def _looked_up_matrices(table: AxisTable, blocks: list[UseGroup]) -> list[CoverageNote]:
    """A remark on lookups of whole matrices: it is rows of a table that are read, not experts."""
    found = []
    for block in blocks:
        sizes = [math.prod(map(table.size, table.atoms(a))) for a in block.uses[0].out_axes]
        if block.kind.diagonal_inputs and len(sizes) > 1:
            entry, width = "x".join(map(str, sizes)), block.weight.out_features
            reason = (
                f"is read as a table, each row of it {entry}, so its output side has {width} "
                "features; kernels of experts have factors of their own, where a product reads the "
                "kernel that each row picks"
            )
            found.append(CoverageNote(block.weight.path, reason, fatal=False))
    return found


def _owners(table: AxisTable, blocks: list[UseGroup]) -> dict[int, UseGroup]:
    """For each block, the first block that reads the same inputs in the same way.

    One whose kernel is also read in the other orientation has an A for itself.
    """
    first: dict[Any, UseGroup] = {}
    by_path = collections.defaultdict(list)
    for block in blocks:
        by_path[block.weight.path].append(block)
    pairs = (p for group in by_path.values() for p in itertools.combinations(group, 2))
    turned = {id(block) for pair in pairs if _are_turned(*pair) for block in pair}
    keys = {id(b): id(b) if id(b) in turned else _input_key(table, b) for b in blocks}
    ordered = sorted(blocks, key=lambda b: bool(b.computed_from))  # those of parameters come first
    return {id(b): first.setdefault(keys[id(b)], b) for b in ordered}


def _are_turned(one: UseGroup, other: UseGroup) -> bool:
    """Whether two blocks read one kernel in opposite orientations: these are made one block."""
    return one.kind is other.kind and one.weight.is_transpose_of(other.weight)


def _input_key(table: AxisTable, block: UseGroup) -> Any:
    if block.kind.elementwise or any(u.view.scaled or u.view.chosen for u in block.uses):
        return id(block)
    return (
        block.kind.name,
        block.weight.stack_shape,
        *sorted((_use_key(table, u), tuple(at)) for u, at in block.at.items()),
    )


def _use_key(table: AxisTable, use: Use) -> tuple[Any, ...]:
    assert use.data is not None
    return (use.data.number, use.scope, use.view.traced_indices, _reading(table, use))


def _reading(table: AxisTable, use: Use) -> str:
    """How the equation reads its data operand, in the parameter's own order."""
    where, _ = atom_positions(table, use.view)
    own_axis = own_axes(table, use.view)
    pieces = pieces_of(table, use.view.joins) or {}
    cuts = [cuts_of(table, pieces, axis) for axis in (*use.in_axes, *use.batch_axes)]
    reading = use.kind.reading(use, lambda axis: [where[a] for a in own_axis(axis)])
    return f"{reading} {cuts}" if any(cuts) else reading
