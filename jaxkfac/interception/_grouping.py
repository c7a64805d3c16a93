"""Layer uses grouped into layers: names, orientation, joined biases, shared inputs."""

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from jaxkfac.interception._axes import Atoms, AxisTable
from jaxkfac.interception._index import Range, index_name, overlap
from jaxkfac.interception._joins import cuts_of, own_atoms, pieces_of
from jaxkfac.interception._kind import Kind
from jaxkfac.interception._layer import Layer, ParameterMatrix
from jaxkfac.interception._table import selector
from jaxkfac.interception._values import CoverageNote, Use, View


@dataclasses.dataclass(eq=False)
class _UseGroup:
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
    blocks = _blocks(table, matrices, experts)
    joined = _join_biases(table, blocks, biases, others, experts)
    beside = {part.path for b in blocks for part in (b.weight, b.bias) if part}
    elementwise = [u for u in uses if u.kind.elementwise]
    blocks += _blocks(table, elementwise, experts, beside, joined)
    order = {u: i for i, u in enumerate(uses)}
    blocks.sort(key=lambda b: order[b.uses[0]])
    blocks, notes = _without_overlaps(blocks)
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
            use.free_stack = _reads_experts(use, experts)
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


def _is_dense(block: _UseGroup, size: int, max_dense: int, *, scale_blocks: bool) -> bool:
    """Whether the output side, or the block of an elementwise kind, is a matrix."""
    if size > max_dense or not block.kind.covered:
        return False
    return scale_blocks or not block.kind.elementwise


def _positions(table: AxisTable, view: View) -> tuple[dict[int, int], tuple[int, ...]]:
    """Atom -> position, and the atoms' sizes, of the (indexed) parameter."""
    atoms = [a for axis in view.own for a in table.atoms(axis)]
    return {a: i for i, a in enumerate(atoms)}, tuple(table.size(a) for a in atoms)


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


def _own_axes(table: AxisTable, view: View) -> Callable[[Atoms], Atoms]:
    """From an axis of a view to the parameter's own atoms."""
    pieces = pieces_of(table, view.joins) or {}
    return lambda axis: own_atoms(table, pieces, axis)


def stack_of(use: Use, experts: str | None) -> tuple[tuple[int, Atoms], ...]:
    """Size and atoms of the stacked axes of a use, in slot order; size 0: from the atoms."""
    steps = [(c.size, c.atoms) for c in use.view.consumed]
    steps += [(0, axis) for axis in use.batch_axes]
    if _reads_experts(use, experts):
        steps.append((0, use.out_axes[0]))
    return tuple(steps)


def _reads_experts(use: Use, experts: str | None) -> bool:
    """Whether the first free axis is a stack, as the caller's pattern says."""
    if not experts or not use.kind.stacks_outputs or use.batch_axes or len(use.out_axes) < 2:
        return False
    return re.fullmatch(experts, use.view.path) is not None


def _matrix(
    table: AxisTable, use: Use, experts: str | None, beside: Collection[str]
) -> ParameterMatrix:
    if use.kind.elementwise:
        use = dataclasses.replace(use, view=_of_elements(use.view, beside))
    view = use.view
    own_axis = _own_axes(table, view)
    where, sizes = _positions(table, view)
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


def _blocks(
    table: AxisTable,
    uses: Iterable[Use],
    experts: str | None,
    beside: Collection[str] = (),
    without: Collection[tuple[Use, int]] = (),
) -> list[_UseGroup]:
    """One block for each way to read a parameter, and of a stack of parameters for each of them.

    ``beside`` are those that have matrices; ``without`` are uses in some iterations that are left
    out.
    """
    found: dict[Any, _UseGroup] = {}
    for use in uses:
        weight = _matrix(table, use, experts, beside)
        for k, view in enumerate(use.view.members or (use.view,)):
            if (use, k) in without:
                continue
            own = _of_member(weight, view) if use.view.members else weight
            key = (own, use.kind, use.view.number if use.view.computed_from else None)
            if use.kind.elementwise:
                key = (own.path, own.index, "diagonal")
            new = _UseGroup(use.kind, own, {}, computed_from=use.view.computed_from)
            block = found.setdefault(key, new)
            # The slot of a diagonal is beside every part of an array that is this parameter's.
            others = (u for u in block.at if u is not use)
            if not use.kind.elementwise or not any(_same_operand(use, u) for u in others):
                block.at.setdefault(use, []).append(k)
    return list(found.values())


def _of_member(matrix: ParameterMatrix, view: View) -> ParameterMatrix:
    """The matrix that one of a stack of parameters is, from that of the first."""
    return dataclasses.replace(matrix, path=view.path, index=view.index)


def _same_operand(one: Use, other: Use) -> bool:
    return (one.where, one.operand, one.scope) == (other.where, other.operand, other.scope)


def _join_biases(
    table: AxisTable,
    blocks: list[_UseGroup],
    biases: list[Use],
    scales: list[Use],
    experts: str | None,
) -> set[tuple[Use, int]]:
    """Join a bias to a block when each reads the other and neither reads anything else.

    A bias added to a sum of products has the output gradient of each, but one homogeneous
    column cannot be in several blocks: it is joined to none.

    Returns:
        The uses of the biases that are joined, and in which iterations.
    """
    readers = collections.defaultdict(set)
    for use in biases:
        for k, view in _iterations(use):
            readers[view.path, view.index].add((use, k))
    whole = {path for path, index in readers if not index}
    scaled = [view for s in scales for view in s.view.members or (s.view,)]
    taken: set[tuple[Use, int]] = set()
    for block in blocks:
        if not block.kind.product:
            continue
        adds = [b for b in biases if b.join in block.at]
        if len(adds) != len(block.at) or not adds:
            continue
        mine = [
            (add, k, view)
            for add in adds
            for k, view in _iterations(add)
            if _is_added_in(block, add, k)
        ]
        (path, index), *others = dict.fromkeys((view.path, view.index) for _, _, view in mine)
        matrix = _bias_matrix(table, block, adds[0], experts)
        exclusive = not others and {(add, k) for add, k, _ in mine} == readers[path, index]
        exclusive &= not (index and path in whole)
        exclusive &= not any(v.path == path and overlap(v.index, index) for v in scaled)
        if matrix is not None and exclusive:
            block.bias = _of_member(matrix, mine[0][2])
            taken |= readers[path, index]
    return taken


def _is_added_in(block: _UseGroup, add: Use, k: int) -> bool:
    """Whether what a bias adds at iteration k is added to a result of the block's kernel."""
    assert add.join is not None
    own, others = add.view, add.join.view
    one_scan = bool(others.members) and (not own.members or own.stacked_for == others.stacked_for)
    return not one_scan or k in block.at[add.join]


def _iterations(add: Use) -> list[tuple[int, View]]:
    """Which bias is added in which iteration of the scan over a stack of them, or of kernels."""
    number = len(add.join.view.members) if add.join is not None else 0
    return list(enumerate(add.view.members or (add.view,) * (number or 1)))


def _bias_matrix(
    table: AxisTable, block: _UseGroup, add: Use, experts: str | None
) -> ParameterMatrix | None:
    """The bias as a row of the block's matrix; ``None`` if its elements lie in another order."""
    product = add.join
    assert product is not None and add.data is not None and add.view.axes is not None
    own: dict[int, Atoms] = {}  # atom of the product's parameter -> axis of the bias
    its_axis, my_axis = _own_axes(table, product.view), _own_axes(table, add.view)
    for free, axis in zip(add.data.product_axes, add.view.axes, strict=True):
        parts = its_axis(free or ())
        split = table.regroup([my_axis(axis)], [table.size(a) for a in parts])
        if split is None:
            return None
        own.update(zip(parts, split, strict=True))
    weight_at, _ = _positions(table, product.view)
    where, sizes = _positions(table, add.view)
    stack = [(c.size, c.atoms) for c in add.view.consumed]
    atoms, positions = list(sizes), []
    steps = stack_of(product, experts)[len(product.view.consumed) :]
    stacked = [a for _, axis in steps for a in its_axis(axis)]
    stack += [(0, own.get(a, ())) for a in stacked]
    for size, axis in stack:
        at = [where[a] for a in table.atoms(axis) if a in where]
        if size == 1 and not at:
            at = [len(atoms)]
            atoms.append(1)
        positions += at
    free = {a for axis in product.out_axes for a in its_axis(axis)} - set(stacked)
    outputs = [
        where[b]
        for a in sorted(free, key=weight_at.__getitem__)
        for b in table.atoms(own.get(a, ()))
        if b in where
    ]
    if outputs != sorted(outputs):  # the factor has its features in the order of the weight's
        return None
    matrix = ParameterMatrix(
        add.view.path, add.view.index, tuple(atoms), tuple(positions), (), tuple(outputs)
    )
    same = (block.weight.stack_shape, block.weight.out_features)
    return matrix if (matrix.stack_shape, matrix.out_features) == same else None


def _without_overlaps(blocks: list[_UseGroup]) -> tuple[list[_UseGroup], list[CoverageNote]]:
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


def _name(table: AxisTable, blocks: list[_UseGroup]) -> list[CoverageNote]:
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


def _precedence(table: AxisTable, block: _UseGroup) -> tuple[Any, ...]:
    """What the blocks of a parameter are sorted by; nothing in it depends on the program's order.

    An axis of size one is neither an input nor an output: it belongs to the side that has no other.
    """
    weight, view = block.weight, block.uses[0].view
    where, _ = _positions(table, view)
    axes = [{where[a] for a in table.atoms(axis)} for axis in view.own]
    single = [d for d, axis in enumerate(axes) if not axis][-1:]  # behind those of a stack
    inputs, outputs = (
        ([d for d, axis in enumerate(axes) if axis & set(side)] or single, side)
        for side in (weight.inputs, weight.outputs)
    )
    return block.kind.rank, block.bias is None, inputs > outputs, weight.inputs, weight.outputs


def _looked_up_matrices(table: AxisTable, blocks: list[_UseGroup]) -> list[CoverageNote]:
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


def _owners(table: AxisTable, blocks: list[_UseGroup]) -> dict[int, _UseGroup]:
    """For each block, the first block that reads the same inputs in the same way.

    One whose kernel is also read in the other orientation has an A for itself.
    """
    first: dict[Any, _UseGroup] = {}
    by_path = collections.defaultdict(list)
    for block in blocks:
        by_path[block.weight.path].append(block)
    pairs = (p for group in by_path.values() for p in itertools.combinations(group, 2))
    turned = {id(block) for pair in pairs if _are_turned(*pair) for block in pair}
    keys = {id(b): id(b) if id(b) in turned else _input_key(table, b) for b in blocks}
    ordered = sorted(blocks, key=lambda b: bool(b.computed_from))  # those of parameters come first
    return {id(b): first.setdefault(keys[id(b)], b) for b in ordered}


def _are_turned(one: _UseGroup, other: _UseGroup) -> bool:
    """Whether two blocks read one kernel in opposite orientations: these are made one block."""
    return one.kind is other.kind and one.weight.is_transpose_of(other.weight)


def _input_key(table: AxisTable, block: _UseGroup) -> Any:
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
    where, _ = _positions(table, use.view)
    own_axis = _own_axes(table, use.view)
    pieces = pieces_of(table, use.view.joins) or {}
    cuts = [cuts_of(table, pieces, axis) for axis in (*use.in_axes, *use.batch_axes)]
    reading = use.kind.reading(use, lambda axis: [where[a] for a in own_axis(axis)])
    return f"{reading} {cuts}" if any(cuts) else reading
