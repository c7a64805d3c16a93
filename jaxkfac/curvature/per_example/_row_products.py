"""Products with the rows of a Jacobian, from one trace of the program; rows of all devices."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxkfac._mapped_axes import num_devices, sum_over_devices
from jaxkfac.curvature.per_example._gram_plan import GramPlan, plan_of
from jaxkfac.curvature.per_example._jacobian_rows import (
    Cotangents,
    GatheredSide,
    JacobianRows,
    RowSource,
)
from jaxkfac.curvature.per_example._row_taps import (
    GatheredRows,
    along_matrix,
    leaf_products,
    pair_norms,
    pair_products,
    weighted_matrix,
)
from jaxkfac.factors import ModelCall
from jaxkfac.interception import Layer, ParameterMatrix
from jaxkfac.memory import MemoryBudgetError, bytes_text

_EXACT = jax.lax.Precision.HIGHEST  # never TF32: K and J have to be of one matrix

# ---------------- products of two sides


def sides_of(source: RowSource, calls: Sequence[ModelCall]) -> list[JacobianRows]:
    """The rows of each call; what one of them leaves to a second pass, all do."""
    sides = [JacobianRows(source, call) for call in calls]
    second: dict[str, str] = {}
    for side in sides:
        second |= side.second
    for side in sides:
        side.second = second
    return sides


def _gathered(
    sides: Sequence[JacobianRows], plan: GramPlan, max_bytes: int | None
) -> list[GatheredSide]:
    """What each side gathers.

    Raises:
        MemoryBudgetError: the plan takes more than ``max_bytes``.
    """
    if max_bytes is not None and plan.num_bytes > max_bytes:
        result = " x ".join(map(str, plan.shape))
        raise MemoryBudgetError(
            f"max_bytes={max_bytes}: a result of {result} takes {bytes_text(plan.num_bytes)} "
            f"({bytes_text(plan.result_bytes)} for itself, the rest for rows and gradients of the "
            "layers, without the passes of the model): allow that much, give fewer rows, or choose "
            "fewer layers="
        )
    by_pairs = [layer.name for layer in plan.layers if layer.method == "pairs"]
    by_rows = {layer.name: layer.is_tied for layer in plan.layers if layer.from_rows}
    return [side.gathered(by_pairs, by_rows) for side in sides]


def _block(side: JacobianRows, one: GatheredRows, other: GatheredRows) -> Float[Array, "N D M E"]:
    """Inner products of the rows of two groups."""
    mine, theirs = one.gradients, other.gradients
    parts = [leaf_products(mine[key], theirs[key]) for key in mine]
    for name, rows in one.rows.items():
        if name in one.by_gradients:
            continue
        weight, bias = side.parts(side.traced.table[name])
        parts.append(pair_products(rows, other.rows[name], weight=weight, bias=bias))
    return sum(parts[1:], parts[0])


def _norms(side: JacobianRows, one: GatheredRows) -> Float[Array, "N D"]:
    """Squared norms of the rows of a group."""
    parts = [jnp.square(x).reshape(*x.shape[:2], -1).sum(-1) for x in one.gradients.values()]
    for name, rows in one.rows.items():
        if name in one.by_gradients:
            continue
        weight, bias = side.parts(side.traced.table[name])
        parts.append(pair_norms(rows, weight=weight, bias=bias))
    return sum(parts[1:], parts[0])


def _in_order(side: JacobianRows, groups: Sequence[Array], axis: int) -> Array:
    """``(N, D)`` of each group at ``axis``, as rows in the order of the outputs."""
    parts: dict[int, Array] = {}
    for group, x in zip(side.groups, groups, strict=True):
        start = 0
        for output, number in zip(group.outputs, group.columns, strict=False):
            part = jax.lax.slice_in_dim(x, start, start + number, axis=axis + 1)
            shape = *x.shape[:axis], x.shape[axis] * number, *x.shape[axis + 2 :]
            parts[output], start = part.reshape(shape), start + number
    return jnp.concatenate([parts[output] for output in sorted(parts)], axis)


# ---------------- the rows of all devices


def _of_all_devices(x: Array, axes: tuple[str, ...], axis: int = 0) -> Array:
    """An array of examples, with those of the other devices behind each other."""
    return jax.lax.all_gather(x, axes, axis=axis, tiled=True) if axes else x


def _examples_of_all(rows: GatheredRows, axes: tuple[str, ...]) -> GatheredRows:
    """What a group gathered, for the examples of all devices."""
    if not axes:
        return rows
    layers = jax.tree.map(lambda x: _of_all_devices(x, axes, 1), rows.rows)
    leaves, formed = jax.tree.map(lambda x: _of_all_devices(x, axes), (rows.leaves, rows.formed))
    return GatheredRows(layers, leaves, formed, rows.by_gradients)


class RowOrder:
    """The order of rows: those of all devices, output by output; vectors have an entry for each.

    Args:
        side: The rows of this device.
        cotangents: The cotangents that they stand for.
        axes: The mapped axes over whose devices rows differ.
    """

    def __init__(self, side: JacobianRows, cotangents: Cotangents, axes: tuple[str, ...]) -> None:
        self.side, self.axes, self._cotangents = side, axes, cotangents
        self._kept = cotangents.kept_parts()

    @functools.cached_property
    def kept(self) -> Bool[Array, " rows"]:
        """Which rows exist."""
        return jnp.concatenate([_of_all_devices(x, self.axes).ravel() for x in self._kept])

    def joined(self, parts: Sequence[Array]) -> Float[Array, " rows"]:
        """A number for each row, from arrays like the outputs; 0 for those that do not exist."""
        dtype = self.side.dtype
        rows = [_of_all_devices(x.astype(dtype), self.axes).ravel() for x in parts]
        return jnp.where(self.kept, jnp.concatenate(rows), jnp.zeros((), dtype))

    def parts(self, rows: Float[Array, "rows ..."]) -> list[Array]:
        """A vector of rows, or a matrix, by output."""
        number = num_devices(self.axes)
        sizes = [number * x.size for x in self._kept]
        return jnp.split(rows, np.cumsum(sizes)[:-1].tolist())

    def local(self, rows: Float[Array, " rows"]) -> list[Array]:
        """The entries of the rows of this device, by output.

        Raises:
            ValueError: there is not one entry for each row.
        """
        if rows.shape != self.kept.shape:
            expected = f"expected one number for each row, {self.kept.shape}"
            raise ValueError(f"x has shape {rows.shape}, {expected}")
        parts = self.parts(jnp.where(self.kept, rows, jnp.zeros((), rows.dtype)))
        if not self.axes:
            return parts
        index = jax.lax.axis_index(self.axes)
        return [
            jax.lax.dynamic_slice_in_dim(part, index * x.size, x.size)
            for part, x in zip(parts, self._kept, strict=True)
        ]

    @property
    def scales(self) -> list[Array]:
        """The factor of each row, like the outputs, in the dtype of the result.

        Raises:
            ValueError: the rows are losses.
        """
        if self.side.source.rows == "losses":
            raise ValueError("rows='losses' have no product with a vector: take rows='outputs'")
        return [scale.astype(self.side.dtype) for scale in self._cotangents.scales]


class RowProducts:
    """Residuals, and products with the Jacobian of one call, in one pass of the model each."""

    def __init__(self, source: RowSource, call: ModelCall) -> None:
        (self._side,) = sides_of(source, [call])
        cotangents = self._side.cotangents_of(self._side.heads)
        self._cotangents, self._order = (
            cotangents,
            RowOrder(self._side, cotangents, self._side.terms.axes),
        )

    def vjp(self, x: Float[Array, " rows"]) -> dict[str, Array]:
        """The transpose's product with one number for each row, by parameter path."""
        local = jnp.concatenate(self._order.local(x))
        gradients = self._side.vjp(self._cotangents.sums(local))
        gradients = sum_over_devices(gradients, self._order.axes)
        return {path: self._side.elements(path, gradients[path]) for path in self._side.selected}

    def jvp(self, vector: dict[str, Array]) -> Float[Array, " rows"]:
        """The product with a vector, given by parameter path; other paths count as zero."""
        both = zip(self._order.scales, self._side.tangents(vector), strict=True)
        return self._order.joined([scale * x.astype(scale.dtype) for scale, x in both])

    def residuals(self) -> Float[Array, " rows"]:
        """The residuals, whose squared norm is twice the loss."""
        return self._order.joined(self._side.residuals())


class GatheredProducts:
    """Products with the Jacobian of one call from its rows, which one or a few passes gather.

    Args:
        source: What the rows are.
        calls: One call; or two, for their Gram matrix.
        diagonal: Whether the squared norms alone are computed.
        max_bytes: Most bytes of the result and of what is gathered.

    Attributes:
        side: The rows of the first call.

    Raises:
        MemoryBudgetError: it takes more than ``max_bytes``.
    """

    def __init__(
        self,
        source: RowSource,
        calls: Sequence[ModelCall],
        *,
        max_bytes: int | None = None,
        diagonal: bool = False,
    ) -> None:
        self._sides = sides = sides_of(source, calls)
        plan = plan_of(sides if diagonal else [sides[0], sides[-1]])
        self._found = _gathered(sides, plan, max_bytes)
        self._orders = []
        for side, found in zip(sides, self._found, strict=True):
            terms_of: Any = found.emitted.at.terms_of
            axes = terms_of.axes
            self._orders.append(RowOrder(side, found.emitted.cotangents, axes))
        self.side, self.order = sides[0], self._orders[0]

    def gram(self) -> Float[Array, "rows columns"]:
        """The Gram matrix of the rows of the call, with themselves or those of the other one."""
        first, last, axes = self._sides[0], self._sides[-1], self.order.axes
        rows = self._found[0].groups
        every = [_examples_of_all(x, axes) for x in self._found[-1].groups]
        blocks: dict[tuple[int, int], Array] = {}
        for i, x in enumerate(rows):
            for j, y in enumerate(every):
                if len(self._sides) == 1 and j < i:
                    blocks[i, j] = blocks[j, i].transpose(2, 3, 0, 1)
                else:
                    blocks[i, j] = _of_all_devices(_block(first, x, y), axes)
        lines = [
            _in_order(last, [blocks[i, j] for j in range(len(every))], 2) for i in range(len(rows))
        ]
        matrix = _in_order(first, lines, 0)
        kept = self.order.kept[:, None] & self._orders[-1].kept
        return jnp.where(kept, matrix, jnp.zeros((), matrix.dtype))

    def squared_norms(self) -> Float[Array, " rows"]:
        """The diagonal of the Gram matrix."""
        return self._in_order([_norms(self.side, x) for x in self._found[0].groups])

    def residuals(self) -> Float[Array, " rows"]:
        """The residuals, whose squared norm is twice the loss."""
        return self.order.joined(self.side.residuals(self._found[0].emitted))

    def jvp(self, vector: dict[str, Array]) -> Float[Array, " rows"]:
        """The product with a vector, given by parameter path; other paths count as zero."""
        dtype = self.side.dtype
        zeros = lambda path: jnp.zeros(self.side.traced.shapes[path], dtype)
        given = {path: vector[path].astype(dtype) for path in vector}
        chosen = {
            path: self.side.elements(path, given[path]) if path in given else zeros(path)
            for path in self.side.selected
        }
        return self._in_order([self._along(x, chosen) for x in self._found[0].groups])

    def vjp(self, x: Float[Array, " rows"]) -> dict[str, Array]:
        """The transpose's product with one number for each row, by parameter path."""
        side, dtype = self.side, self.side.dtype
        parts = self.order.local(x)
        leaves = {path: jnp.zeros(side.traced.shapes[path], dtype) for path in side.selected}
        for group, found in zip(side.groups, self._found[0].groups, strict=True):
            # Losses have one row for each example, whatever the number of outputs.
            outputs = group.outputs[: len(group.columns)]
            mine = [parts[k].reshape(group.number, -1) for k in outputs]
            self._add(leaves, found, jnp.concatenate(mine, 1))
        leaves = sum_over_devices(leaves, self.order.axes)
        return {path: side.elements(path, x) for path, x in leaves.items()}

    def _in_order(self, groups: Sequence[Array]) -> Float[Array, " rows"]:
        """Numbers of this device's rows, by group, as those of all rows."""
        rows = _in_order(self.side, [_of_all_devices(x, self.order.axes) for x in groups], 0)
        return jnp.where(self.order.kept, rows, jnp.zeros((), rows.dtype))

    def _along(self, found: GatheredRows, chosen: dict[str, Array]) -> Float[Array, "N D"]:
        """The products of a group's gradients with a vector."""
        sums = []
        for path, gradients in found.leaves.items():
            axes = list(range(2, gradients.ndim)), list(range(gradients.ndim - 2))
            sums.append(jnp.tensordot(gradients, chosen[path], axes, precision=_EXACT))
        for name, rows in found.rows.items():
            layer = self.side.traced.table[name]
            weight, bias = self.side.parts(layer)
            of_weight = _matrix(layer, layer.weight, chosen) if weight else None
            of_bias = _matrix(layer, layer.bias, chosen)[:, 0] if bias else None
            sums.append(along_matrix(rows, of_weight, of_bias))
        return sum(sums[1:], sums[0])

    def _add(self, leaves: dict[str, Array], found: GatheredRows, x: Array) -> None:
        """Add the sum of a group's gradients, each times its entry of ``x``."""
        for path, gradients in found.leaves.items():
            leaves[path] += jnp.tensordot(x.astype(gradients.dtype), gradients, 2, precision=_EXACT)
        for name, rows in found.rows.items():
            layer = self.side.traced.table[name]
            weight, bias = self.side.parts(layer)
            size, x = layer.in_features, x.astype(rows.outputs.dtype)
            products = weighted_matrix(rows, x, size, weight=weight, bias=bias)
            for matrix, value in zip((layer.weight, layer.bias), products, strict=True):
                if matrix is not None and value is not None:
                    value = value.reshape(*layer.stack, -1, layer.out_features)
                    before = _read(layer, matrix, leaves)
                    leaves[matrix.path] = matrix.write(leaves[matrix.path], before + value)


def _read(layer: Layer, matrix: ParameterMatrix, leaves: dict[str, Array]) -> Array:
    """A layer's matrix, ``(stack..., in, out)``."""
    return matrix.read(leaves[matrix.path]).reshape(*layer.stack, -1, layer.out_features)


def _matrix(layer: Layer, matrix: Any, leaves: dict[str, Array]) -> Float[Array, "l i o"]:
    """A layer's matrix with the stack as one axis."""
    read = _read(layer, matrix, leaves)
    return read.reshape(-1, *read.shape[-2:])
