"""Grouping of layer uses into layers: names, orientation, shared inputs."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

from jaxkfac.interception._kind import Use
from jaxkfac.interception._layer import Layer, ParameterMatrix, selector
from jaxkfac.interception._use_groups import (
    UseGroup,
    atom_positions,
    grouped,
    of_member,
    own_axes,
    reads_experts,
    stack_of,
    without_overlaps,
)
from jaxkfac.interception.values._axes import Atoms, AxisTable
from jaxkfac.interception.values._index import cuts_of, index_name, overlap, pieces_of
from jaxkfac.interception.values._values import CoverageNote, View

# ---------------- biases that are joined to a layer


def join_biases(
    table: AxisTable,
    blocks: list[UseGroup],
    biases: list[Use],
    scales: list[Use],
    experts: str | None,
) -> set[tuple[Use, int]]:
    """Join a bias to a block if each reads the other and neither reads anything else.

    A bias that is added to a sum of products has the output gradient of each of them. One
    homogeneous column cannot be in several blocks, so such a bias is joined to none.

    Returns:
        The uses of the joined biases, each with its iteration.
    """
    # Every reading of a bias is collected first: one that is added outside the block has a gradient
    # that the column of ones does not see.
    readers = collections.defaultdict(set)
    for use in biases:
        for k, view in _iterations(use):
            readers[view.source.path, view.source.index].add((use, k))
    full_paths = {path for path, index in readers if not index}
    # A bias that is also multiplied somewhere has two gradients, of which the block would hold one.
    scaled = [view for s in scales for view in s.view.source.members or (s.view,)]
    joined: set[tuple[Use, int]] = set()
    for block in blocks:
        if not block.kind.product:
            continue
        adds = [b for b in biases if b.elements.joint in block.at]
        # One column of ones stands for the bias in all uses, so each of them must add it.
        if len(adds) != len(block.at) or not adds:
            continue
        mine = [
            (add, k, view)
            for add in adds
            for k, view in _iterations(add)
            if _is_added_in(block, add, k)
        ]
        (path, index), *further = dict.fromkeys(
            (view.source.path, view.source.index) for _, _, view in mine
        )
        matrix = _bias_matrix(table, block, adds[0], experts)
        exclusive = not further and {(add, k) for add, k, _ in mine} == readers[path, index]
        # A slice of a parameter that is also read in full has a further gradient.
        exclusive &= not (index and path in full_paths)
        exclusive &= not any(
            v.source.path == path and overlap(v.source.index, index) for v in scaled
        )
        if matrix is not None and exclusive:
            block.bias = of_member(matrix, mine[0][2])
            joined |= readers[path, index]
    return joined


def _is_added_in(block: UseGroup, add: Use, k: int) -> bool:
    """Whether a bias is added, at iteration ``k``, to a result of the block's kernel."""
    assert add.elements.joint is not None
    bias_view, kernel_view = add.view, add.elements.joint.view
    one_scan = bool(kernel_view.source.members) and (
        not bias_view.source.members
        or bias_view.source.stacked_for == kernel_view.source.stacked_for
    )
    return not one_scan or k in block.at[add.elements.joint]


def _iterations(add: Use) -> list[tuple[int, View]]:
    """The view of the bias in each iteration of a scan over a stack of biases, or of kernels."""
    number = len(add.elements.joint.view.source.members) if add.elements.joint is not None else 0
    return list(enumerate(add.view.source.members or (add.view,) * (number or 1)))


def _bias_matrix(
    table: AxisTable, block: UseGroup, add: Use, experts: str | None
) -> ParameterMatrix | None:
    """The bias as a row of the block's matrix; ``None`` if its elements are in another order."""
    product = add.elements.joint
    assert product is not None and add.data is not None and add.view.axes is not None
    bias_axis_of: dict[int, Atoms] = {}  # atom of the product's parameter -> axis of the bias
    its_axis, my_axis = own_axes(table, product.view), own_axes(table, add.view)
    for free, axis in zip(add.data.product_axes, add.view.axes, strict=True):
        weight_atoms = its_axis(free or ())
        split = table.regroup([my_axis(axis)], [table.size(a) for a in weight_atoms])
        if split is None:
            return None
        bias_axis_of.update(zip(weight_atoms, split, strict=True))
    weight_at, _ = atom_positions(table, product.view)
    where, sizes = atom_positions(table, add.view)
    stack = [(c.size, c.atoms) for c in add.view.source.consumed]
    atoms, positions = list(sizes), []
    steps = stack_of(product, experts)[len(product.view.source.consumed) :]
    stacked = [a for _, axis in steps for a in its_axis(axis)]
    stack += [(0, bias_axis_of.get(a, ())) for a in stacked]
    for size, axis in stack:
        at = [where[a] for a in table.atoms(axis) if a in where]
        # A stacked axis of length one has no atom, but the matrix needs its position.
        if size == 1 and not at:
            at = [len(atoms)]
            atoms.append(1)
        positions += at
    free = {a for axis in product.axes.outputs for a in its_axis(axis)} - set(stacked)
    outputs = [
        where[b]
        for a in sorted(free, key=weight_at.__getitem__)
        for b in table.atoms(bias_axis_of.get(a, ()))
        if b in where
    ]
    if outputs != sorted(outputs):  # the factor's features are in the order of the weight's
        return None
    matrix = ParameterMatrix(
        add.view.source.path,
        add.view.source.index,
        tuple(atoms),
        tuple(positions),
        (),
        tuple(outputs),
    )
    expected = (block.weight.stack_shape, block.weight.out_features)
    return matrix if (matrix.stack_shape, matrix.out_features) == expected else None


# ---------------- layers


def group_uses(
    table: AxisTable,
    uses: Sequence[Use],
    *,
    max_dense: int,
    experts: str | None = None,
    pattern: str | None = None,
    scale_blocks: bool = False,
) -> tuple[list[Layer], list[CoverageNote], dict[Use, Use]]:
    """Group uses into layers.

    Args:
        table: The axis atoms of the analysis.
        uses: Every use, in program order.
        max_dense: A side with more features is stored as a diagonal.
        experts: Full-match pattern of parameters whose free leading axis is a stack.
        pattern: Full-match pattern over layer names; layers that do not match are left untapped.
        scale_blocks: Whether scales and lone biases have a dense block.

    Returns:
        The layers in program order, notes for the coverage report, and for each use in a layer
        the same use with the names of its layers.

    Raises:
        UnknownLayerError: ``pattern`` matches no layer.
    """
    # A second pass squares the whole gradient of a parameter, whatever else reads it.
    second_pass_paths = {u.view.source.path for u in uses if not u.kind.covered}
    uses = [
        u
        for u in uses
        if not (u.kind.elementwise and u.kind.covered and u.view.source.path in second_pass_paths)
    ]
    matrices = [u for u in uses if not u.kind.elementwise]
    biases = [u for u in uses if u.kind.inserts]
    scales = [u for u in uses if u.kind.elementwise and not u.kind.inserts]
    blocks = grouped(table, matrices, experts)
    joined = join_biases(table, blocks, biases, scales, experts)
    # Diagonals are grouped after biases are joined: that of a parameter which has a matrix covers
    # the range it is read in, and any other covers the full parameter.
    beside = {matrix.path for b in blocks for matrix in (b.weight, b.bias) if matrix}
    elementwise = [u for u in uses if u.kind.elementwise]
    blocks += grouped(table, elementwise, experts, beside, joined)
    # Matrices were grouped before diagonals; the table lists layers as the program reads them.
    order = {u: i for i, u in enumerate(uses)}
    blocks.sort(key=lambda b: order[b.uses[0]])
    blocks, notes = without_overlaps(blocks)
    notes += _name(table, blocks) + _looked_up_matrices(table, blocks)
    selected = selector(pattern, [b.name for b in blocks])
    for block in blocks:
        masked = next((u.view.history.masked for u in block.uses if u.view.history.masked), "")
        if masked and not block.kind.elementwise:
            reason = f"is masked by a constant in `{masked}`; its factors are those of the product"
            notes.append(CoverageNote(block.weight.path, reason, fatal=False))
        if not block.kind.covered:
            reason = "has a diagonal of whole examples' gradients, from a second pass"
            notes.append(CoverageNote(block.weight.path, reason, fatal=False))
        if any(u.elements.whole_examples for u in block.uses):
            reason = "has a diagonal of whole examples' gradients: a weight is formed for each"
            notes.append(CoverageNote(block.weight.path, reason, fatal=False))
        if block.name not in selected:
            notes.append(CoverageNote(block.weight.path, "is left out by layers=", fatal=False))
    blocks = [b for b in blocks if b.name in selected]
    owners = _owners(table, blocks)
    # A shared A needs its column of ones as soon as one of its layers has a bias, and so its size
    # decides for all of them whether it is dense.
    with_ones = {id(owners[id(b)]) for b in blocks if b.bias is not None}
    layers = []
    names: dict[Use, dict[int, str]] = collections.defaultdict(dict)
    for block in blocks:
        owner = owners[id(block)]
        for use, iterations in block.at.items():
            # One use may serve several layers, one in each iteration of a scan over a stack.
            names[use].update(dict.fromkeys(iterations, block.name))
        ones = id(owner) in with_ones
        elementwise, diagonal = block.kind.elementwise, block.kind.reads.tokens
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
    tapped = {}
    for use, of_iteration in names.items():
        number = len(use.view.source.members) or 1
        axes = use.axes._replace(free_stack=reads_experts(use, experts))
        layer_names = tuple(of_iteration.get(k) for k in range(number))
        tapped[use] = dataclasses.replace(use, axes=axes, layers=layer_names)
    return layers, notes, tapped


def _is_dense(block: UseGroup, size: int, max_dense: int, *, scale_blocks: bool) -> bool:
    """Whether the output side, or the block of an elementwise kind, is a matrix."""
    if size > max_dense or not block.kind.covered:
        return False
    return scale_blocks or not block.kind.elementwise


def _name(table: AxisTable, blocks: list[UseGroup]) -> list[CoverageNote]:
    """Name every block; if a parameter has several, the dense one gets the path alone.

    For a kernel that is read in both orientations, it is the block that has a bias, or else the one
    that contracts the first axes.
    """
    notes, by_path = [], collections.defaultdict(list)
    for block in blocks:
        by_path[block.weight.path + index_name(block.weight.index)].append(block)
    for path, group in by_path.items():
        names_used: set[str] = set()
        # The names must not depend on which use comes first in the program: a saved state is read
        # back by name.
        for block in sorted(group, key=lambda b: _precedence(table, b)):
            further = path if block.computed_from else f"{path}@{block.kind.suffix}"
            name = path if not names_used else further
            # Blocks of one kind have one suffix, so a third way to read a parameter needs more.
            while name in names_used:
                name += "'"
            names_used.add(name)
            block.name = name
            # A computed weight has no path of its own; the name keeps it apart from the parameter
            # that it is called after.
            if block.computed_from:
                block.weight = dataclasses.replace(block.weight, path=name)
        if len(group) > 1 and not group[0].computed_from:
            names = ", ".join(sorted(names_used))
            turned = any(_are_turned(*pair) for pair in itertools.combinations(group, 2))
            taken_by = " and its transpose, as one product" if turned else ""
            reason = f"has {len(group)} blocks: {names}; the optimizer uses {path!r}{taken_by}"
            notes.append(CoverageNote(group[0].weight.path, reason, fatal=False))
    return notes


def _precedence(table: AxisTable, block: UseGroup) -> tuple[Any, ...]:
    """The sort key of the blocks of a parameter, which does not depend on the program's order.

    An axis of size one is neither an input nor an output. It counts for a side without other axes.
    """
    weight, view = block.weight, block.uses[0].view
    where, _ = atom_positions(table, view)
    axes = [{where[a] for a in table.atoms(axis)} for axis in view.source.remaining_axes]
    single = [d for d, axis in enumerate(axes) if not axis][-1:]  # the last: stacks come first
    inputs, outputs = (
        ([d for d, axis in enumerate(axes) if axis & set(side)] or single, side)
        for side in (weight.inputs, weight.outputs)
    )
    return block.kind.rank, block.bias is None, inputs > outputs, weight.inputs, weight.outputs


def _looked_up_matrices(table: AxisTable, blocks: list[UseGroup]) -> list[CoverageNote]:
    """Notes about lookups of whole matrices, which read rows of a table and not experts."""
    notes = []
    for block in blocks:
        sizes = [math.prod(map(table.size, table.atoms(a))) for a in block.uses[0].axes.outputs]
        if block.kind.reads.tokens and len(sizes) > 1:
            entry, width = "x".join(map(str, sizes)), block.weight.out_features
            reason = (
                f"is read as a table, each row of it {entry}, so its output side has {width} "
                "features; kernels of experts have factors of their own, where a product reads the "
                "kernel that each row picks"
            )
            notes.append(CoverageNote(block.weight.path, reason, fatal=False))
    return notes


def _owners(table: AxisTable, blocks: list[UseGroup]) -> dict[int, UseGroup]:
    """For each block, the first block that reads the same inputs in the same way.

    A block whose kernel is also read in the other orientation has its own A.
    """
    first: dict[Any, UseGroup] = {}
    by_path = collections.defaultdict(list)
    for block in blocks:
        by_path[block.weight.path].append(block)
    pairs = (p for group in by_path.values() for p in itertools.combinations(group, 2))
    # The factors of such a pair are combined into one block, whose A must be its own.
    turned = {id(block) for pair in pairs if _are_turned(*pair) for block in pair}
    keys = {id(b): id(b) if id(b) in turned else _input_key(table, b) for b in blocks}
    # A layer that preconditions nothing must not be the one that stores an A which others need.
    ordered = sorted(blocks, key=lambda b: bool(b.computed_from))  # blocks of parameters first
    return {id(b): first.setdefault(keys[id(b)], b) for b in ordered}


def _are_turned(first: UseGroup, second: UseGroup) -> bool:
    """Whether two blocks read one kernel in opposite orientations, to be merged into one block."""
    return first.kind is second.kind and first.weight.is_transpose_of(second.weight)


def _input_key(table: AxisTable, block: UseGroup) -> Any:
    # A scaled parameter scales the sums of its own slot, and a chosen one leaves rows out: no other
    # layer has that A.
    if block.kind.elementwise or any(u.view.history.scaled or u.view.chosen for u in block.uses):
        return id(block)
    return (
        block.kind.name,
        block.weight.stack_shape,
        *sorted((_use_key(table, u), tuple(at)) for u, at in block.at.items()),
    )


def _use_key(table: AxisTable, use: Use) -> tuple[Any, ...]:
    assert use.data is not None
    # The scope belongs to the key, because one variable inside a scan has other rows in each
    # iteration than outside it.
    return (
        use.data.number,
        use.at.scope.scans,
        use.view.source.traced_indices,
        _reading(table, use),
    )


def _reading(table: AxisTable, use: Use) -> str:
    """How the equation reads its data operand, in the parameter's own order."""
    where, _ = atom_positions(table, use.view)
    own_axis = own_axes(table, use.view)
    pieces = pieces_of(table, use.view.joins) or {}
    cuts = [cuts_of(table, pieces, axis) for axis in (*use.axes.inputs, *use.axes.stack)]
    reading = use.kind.reading(use, lambda axis: [where[a] for a in own_axis(axis)])
    return f"{reading} {cuts}" if any(cuts) else reading
