"""How a Gram matrix is computed: by pairs of positions or by gradients, layer by layer."""

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from jaxkfac._text import number, ruled
from jaxkfac.curvature.per_example._jacobian_rows import JacobianRows
from jaxkfac.curvature.per_example._row_taps import RowGroup
from jaxkfac.interception import Layer, Traced, Use
from jaxkfac.linalg import statistics_dtype
from jaxkfac.memory import bytes_text

Method = Literal["pairs", "gradients", "second pass"]
TIED = "another layer reads the same elements"
TOKENS = 2**24  # whole numbers that float32 holds


class LayerPlan(NamedTuple):
    """How the part of one layer, or of one parameter that no layer covers, is computed.

    Attributes:
        name: Name of the layer, or path of the parameter.
        kind: Kind of the layer.
        in_features: Size of the input side, 1 where there is none.
        out_features: Size of the output side; of a parameter without a layer, its elements.
        stack: Entries of the stack.
        positions: Number of positions for each example, of all uses.
        method: ``"pairs"`` of positions, ``"gradients"`` of each row, or these from a
            ``"second pass"``.
        operations: Number of multiplications and additions of its products.
        num_bytes: Bytes of what is gathered for it.
        reason: Why it is not ``"pairs"``, where costs did not decide.
        from_rows: Whether gradients are formed from gathered rows, all at once, and not in the
            backward pass, example by example.
    """

    name: str
    kind: str
    in_features: int
    out_features: int
    stack: int
    positions: int
    method: Method
    operations: int
    num_bytes: int
    reason: str = ""
    from_rows: bool = False

    @property
    def is_tied(self) -> bool:
        """Whether its gradients are added to those of another layer before the product."""
        return self.reason == TIED


@dataclasses.dataclass(frozen=True)
class GramPlan:
    """How a Gram matrix is computed; ``print(plan)`` is the table.

    Attributes:
        layers: One entry for each layer, and for each parameter that no layer covers.
        shape: Shape of the result.
        result_bytes: Bytes of the result.
        explicit_operations: Operations of the products if all rows' gradients were formed.
    """

    layers: tuple[LayerPlan, ...]
    shape: tuple[int, ...]
    result_bytes: int
    explicit_operations: int

    @property
    def operations(self) -> int:
        """Operations of all products, without those of the model's passes."""
        return sum(layer.operations for layer in self.layers)

    @property
    def num_bytes(self) -> int:
        """Bytes of the result and of what is gathered for it, without those of the model."""
        return self.result_bytes + sum(layer.num_bytes for layer in self.layers)

    def __str__(self) -> str:
        head = ("layer", "kind", "in", "out", "stack", "positions", "method", "operations", "bytes")
        rows = [
            (
                x.name,
                x.kind,
                str(x.in_features),
                str(x.out_features),
                str(x.stack),
                str(x.positions or "-"),
                x.method,
                number(float(x.operations)),
                bytes_text(x.num_bytes),
            )
            for x in self.layers
        ]
        lines = ruled(head, rows, words=(0, 1, 6))
        notes = [f"{x.name}: {x.reason}" for x in self.layers if x.reason]
        return "\n".join([*lines, *notes, self._total()])

    def __repr__(self) -> str:
        return f"GramPlan: {self._total()}"

    def _total(self) -> str:
        share = self.operations / max(self.explicit_operations, 1)
        result = " x ".join(map(str, self.shape))
        return (
            f"{result} in {bytes_text(self.num_bytes)}; {number(float(self.operations))} "
            f"operations, {number(share)} of those with all gradients formed"
        )


class RowCounts(NamedTuple):
    """The rows of a layer in the groups of one side of the product.

    Attributes:
        examples: Positions of all examples, summed over groups.
        rows: The same, each example counted once for each of its rows.
        squares: Squared positions, summed over examples of all groups.
        row_squares: The same, each example counted once for each of its rows.
        number: Number of rows, without positions.
        positions: Number of positions of an example, the most of all groups.
    """

    examples: int
    rows: int
    squares: int
    row_squares: int
    number: int
    positions: int

    @classmethod
    def of(cls, groups: Sequence[RowGroup], positions: Sequence[int]) -> "RowCounts":
        """Count the rows, given the positions of the layer in each group."""
        both = list(zip(groups, positions, strict=True))
        return cls(
            sum(g.number * s for g, s in both),
            sum(g.size * s for g, s in both),
            sum(g.number * s * s for g, s in both),
            sum(g.size * s * s for g, s in both),
            sum(g.size for g in groups),
            max(positions),
        )


def planned(layer: Layer, sides: Sequence[RowCounts], itemsize: int, reason: str) -> LayerPlan:
    """Choose the method for one layer by the number of operations.

    Args:
        layer: The layer.
        sides: Its rows on both sides of the product; one entry for the diagonal alone. The same
            object twice stands for a symmetric product.
        itemsize: Bytes of a number.
        reason: Why pairs cannot be taken; empty if they can.
    """
    stack, n_in, n_out = math.prod(layer.stack), layer.in_features, layer.out_features
    elementwise, rows_in = layer.is_elementwise, 1 if layer.is_lookup else n_in
    distinct = {id(side): side for side in sides}.values()
    if elementwise:
        n_in = 1
    if len(sides) == 1:
        (own,) = sides
        by_pairs = 2 * stack * (own.squares * rows_in + own.row_squares * n_out)
        products = own.number
    else:
        one, other = sides
        by_pairs = 2 * stack
        by_pairs *= one.examples * other.examples * rows_in + one.rows * other.rows * n_out
        products = one.number * other.number
    forming = 0 if elementwise else sum(x.rows for x in distinct) * rows_in * n_out
    by_gradients = 2 * stack * (forming + products * n_in * n_out)
    gradient_bytes = stack * sum(x.number for x in distinct) * n_in * n_out
    pair_bytes = stack * sum(x.examples * rows_in + x.rows * n_out for x in distinct)
    pairs = not reason and _is_cheaper(by_pairs, by_gradients)
    # Rows of many positions, such as a convolution's patches, would take more than the gradients.
    from_rows = not (pairs or layer.is_lookup or elementwise) and reason in ("", TIED)
    from_rows = from_rows and pair_bytes <= 2 * gradient_bytes
    num_bytes = pair_bytes if pairs else gradient_bytes + from_rows * pair_bytes
    return LayerPlan(
        layer.name,
        layer.kind,
        n_in,
        n_out,
        stack,
        max(side.positions for side in sides),
        "pairs" if pairs else "gradients",
        by_pairs if pairs else by_gradients,
        itemsize * num_bytes,
        reason,
        from_rows,
    )


def _is_cheaper(by_pairs: int, by_gradients: int) -> bool:
    """Whether pairs take no more operations; the tests replace it to run every layer both ways."""
    return by_pairs <= by_gradients


def explicit(size: int, sides: Sequence[RowCounts]) -> int:
    """Operations of the product if the gradients of ``size`` elements are formed."""
    return 2 * size * math.prod(side.number for side in sides)


# ---------------- layers of which pairs of positions do not give the gradient


def reasons_against_pairs(traced: Traced, layers: Sequence[Layer]) -> dict[str, str]:
    """For each layer for which pairs of positions cannot be taken, the reason."""
    reasons = {}
    tied = _tied(layers, traced)
    for layer in layers:
        uses = traced.uses_of(layer)
        if layer.is_elementwise:
            reasons[layer.name] = "has no input side"
        elif layer.name in tied:
            reasons[layer.name] = TIED
        elif any(_accumulates(use) for use in uses):
            reasons[layer.name] = "is read in every iteration of a loop, or in a branch"
        elif any(_repeats(traced, layer, use) for use in uses):
            reasons[layer.name] = "is one entry of a stack that is read in other places too"
        elif layer.is_lookup and layer.in_features >= TOKENS:
            reasons[layer.name] = "has more entries than float32 can number"
    return reasons


def _accumulates(use: Use) -> bool:
    """Whether the cotangents of a slot add up over iterations."""
    return not {("scan", scan) for scan in use.at.scope.scans} <= set(
        use.view.source.traced_indices
    )


def _repeats(traced: Traced, layer: Layer, use: Use) -> bool:
    """Whether a use in a loop over several layers does not stand for all of each layer's uses."""
    names = [name for name in use.layers if name is not None]
    others = [traced.table[name] for name in names]
    uses = {id(x) for x in traced.uses_of(layer)}
    same = all({id(x) for x in traced.uses_of(other)} == uses for other in others)
    return not same or len({*names}) < len(names)


def _tied(layers: Iterable[Layer], traced: Traced) -> set[str]:
    """The layers of which some elements are also those of another layer."""
    matrices = defaultdict(list)
    for layer in layers:
        for matrix in filter(None, (layer.weight, layer.bias)):
            matrices[matrix.path].append((layer.name, matrix))
    tied = set()
    for path, entries in matrices.items():
        depth = max(len(matrix.index) for _, matrix in entries)
        counts = np.zeros(traced.shapes[path][:depth], np.int64)
        for _, matrix in entries:
            counts[matrix.at] += 1
        tied |= {name for name, matrix in entries if np.max(counts[matrix.at]) > 1}
    return tied


def plan_of(sides: Sequence[JacobianRows]) -> GramPlan:
    """Choose how the part of each layer is computed.

    Args:
        sides: Two sides, equal for a symmetric matrix; or one, if the diagonal alone is computed.
    """
    first, itemsize = sides[0], statistics_dtype(*[side.dtype for side in sides]).itemsize
    reasons: dict[str, str] = {}
    for side in sides:
        reasons |= reasons_against_pairs(side.traced, side.layers)

    @functools.cache
    def counts(k: int, layer: Layer | None) -> RowCounts:
        side = sides[k]
        positions = [1 if layer is None else side.places(layer, probe)[1] for probe in side.probes]
        return RowCounts.of(side.groups, positions)

    order = [sides.index(side) for side in sides]
    plain = [counts(k, None) for k in order]
    layers = [
        planned(layer, [counts(k, layer) for k in order], itemsize, reasons.get(layer.name, ""))
        for layer in first.layers
    ]
    size_of = {path: math.prod(first.traced.shapes[path]) for path in first.selected}
    for path, reason in first.second.items():
        rows = sum(plain[k].number for k in set(order))
        layers.append(
            LayerPlan(
                path, "-", 1, size_of[path], 1, 0, "second pass",
                explicit(size_of[path], plain), itemsize * size_of[path] * rows, reason,
            )
        )  # fmt: skip
    every = sum(explicit(size, plain) for size in size_of.values())
    shape = tuple(side.number for side in plain)
    return GramPlan(tuple(layers), shape, itemsize * math.prod(shape), every)
