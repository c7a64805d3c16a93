"""Biases that are joined to the layer whose product they are added to."""

import collections

from jaxkfac.interception._axes import Atoms, AxisTable
from jaxkfac.interception._index import overlap
from jaxkfac.interception._layer import ParameterMatrix
from jaxkfac.interception._matrices import atom_positions, of_member, own_axes, stack_of
from jaxkfac.interception._use_groups import UseGroup
from jaxkfac.interception._values import Use, View


def join_biases(
    table: AxisTable,
    blocks: list[UseGroup],
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
            block.bias = of_member(matrix, mine[0][2])
            taken |= readers[path, index]
    return taken


def _is_added_in(block: UseGroup, add: Use, k: int) -> bool:
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
    table: AxisTable, block: UseGroup, add: Use, experts: str | None
) -> ParameterMatrix | None:
    """The bias as a row of the block's matrix; ``None`` if its elements lie in another order."""
    product = add.join
    assert product is not None and add.data is not None and add.view.axes is not None
    own: dict[int, Atoms] = {}  # atom of the product's parameter -> axis of the bias
    its_axis, my_axis = own_axes(table, product.view), own_axes(table, add.view)
    for free, axis in zip(add.data.product_axes, add.view.axes, strict=True):
        parts = its_axis(free or ())
        split = table.regroup([my_axis(axis)], [table.size(a) for a in parts])
        if split is None:
            return None
        own.update(zip(parts, split, strict=True))
    weight_at, _ = atom_positions(table, product.view)
    where, sizes = atom_positions(table, add.view)
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
