"""Products with the rows of a Jacobian, from one trace of the program; rows of all devices."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxkfac._mapped_axes import num_devices, sum_over_devices
from jaxkfac.curvature.per_example._gram_plan import GramPlan, plan_of
from jaxkfac.curvature.per_example._jacobian_rows import Cotangents, JacobianRows, RowSource
from jaxkfac.curvature.per_example._row_taps import (
    GatheredRows,
    leaf_products,
    pair_norms,
    pair_products,
)
from jaxkfac.factors import ModelCall
from jaxkfac.memory import MemoryBudgetError, bytes_text

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
) -> tuple[list[list[GatheredRows]], list[Bool[Array, " rows"]]]:
    """What each side gathers, by group; and which rows exist.

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
    by_rows = [layer.name for layer in plan.layers if layer.from_rows]
    both = [side.gathered(by_pairs, by_rows) for side in sides]
    return [rows for rows, _ in both], [kept for _, kept in both]


def _block(side: JacobianRows, one: GatheredRows, other: GatheredRows) -> Float[Array, "N D M E"]:
    """Inner products of the rows of two groups."""
    parts = [leaf_products(one.leaves[path], other.leaves[path]) for path in one.leaves]
    for name, rows in one.rows.items():
        weight, bias = side.parts(side.traced.table[name])
        parts.append(pair_products(rows, other.rows[name], weight=weight, bias=bias))
    return sum(parts[1:], parts[0])


def _norms(side: JacobianRows, one: GatheredRows) -> Float[Array, "N D"]:
    """Squared norms of the rows of a group."""
    parts = [jnp.square(x).reshape(*x.shape[:2], -1).sum(-1) for x in one.leaves.values()]
    for name, rows in one.rows.items():
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
    leaves = {path: _of_all_devices(x, axes) for path, x in rows.leaves.items()}
    return GatheredRows(layers, leaves)


class RowProducts:
    """Products with the Jacobian of one call, and its Gram matrix with itself or another call.

    The program is traced once for all of them. If the source names mapped axes, the rows are those
    of all devices, output by output, and vectors of rows have an entry for each.

    Attributes:
        first: The rows of the call.
        last: Those of the other call, or the same object.
    """

    def __init__(self, sides: Sequence[JacobianRows]) -> None:
        self._sides, self.first, self.last = sides, sides[0], sides[-1]

    @classmethod
    def of(cls, source: RowSource, *calls: ModelCall) -> "RowProducts":
        """The products of one call, or of two."""
        return cls(sides_of(source, calls))

    @property
    def plan(self) -> GramPlan:
        """How the Gram matrix is computed."""
        return plan_of([self.first, self.last])

    @property
    def axes(self) -> tuple[str, ...]:
        """The mapped axes over whose devices rows differ."""
        return self.first.terms.axes

    @functools.cached_property
    def _cotangents(self) -> Cotangents:
        return self.first.cotangents_of(self.first.heads)

    @functools.cached_property
    def kept(self) -> Bool[Array, " rows"]:
        """Which rows exist."""
        parts = self._cotangents.kept_parts()
        return jnp.concatenate([_of_all_devices(x, self.axes).ravel() for x in parts])

    def gram(self, max_bytes: int | None = None) -> Float[Array, "rows columns"]:
        """The Gram matrix of the rows of the call, with themselves or those of the other one."""
        first, last, axes = self.first, self.last, self.axes
        rows, kept = _gathered(self._sides, self.plan, max_bytes)
        every = [_examples_of_all(x, axes) for x in rows[-1]]
        one_call, blocks = len(self._sides) == 1, {}
        for i, x in enumerate(rows[0]):
            for j, y in enumerate(every):
                if one_call and j < i:
                    blocks[i, j] = blocks[j, i].transpose(2, 3, 0, 1)
                else:
                    blocks[i, j] = _of_all_devices(_block(first, x, y), axes)
        lines = [
            _in_order(last, [blocks[i, j] for j in range(len(every))], 2)
            for i in range(len(rows[0]))
        ]
        matrix = _in_order(first, lines, 0)
        of_rows, of_columns = (self.kept, self.kept) if axes else (kept[0], kept[-1])
        return jnp.where(of_rows[:, None] & of_columns, matrix, jnp.zeros((), matrix.dtype))

    def squared_norms(self, max_bytes: int | None = None) -> Float[Array, " rows"]:
        """The diagonal of the Gram matrix."""
        rows, _ = _gathered(self._sides, plan_of([self.first]), max_bytes)
        groups = [_of_all_devices(_norms(self.first, x), self.axes) for x in rows[0]]
        norms = _in_order(self.first, groups, 0)
        return jnp.where(self.kept, norms, jnp.zeros((), norms.dtype))

    def vjp(self, x: Float[Array, " rows"]) -> dict[str, Array]:
        """The transpose's product with one number for each row, by parameter path."""
        side, parts = self.first, self._cotangents.kept_parts()
        if x.shape != (number := self.kept.size,):
            raise ValueError(
                f"x has shape {x.shape}, expected one number for each row, ({number},)"
            )
        if self.axes:
            x = jnp.concatenate(self._of_this_device(x, [part.size for part in parts]))
        gradients = side.vjp(self._cotangents.sums(x))
        gradients = sum_over_devices(gradients, self.axes)
        return {path: side.elements(path, gradients[path]) for path in side.selected}

    def _of_this_device(self, x: Array, sizes: Sequence[int]) -> list[Array]:
        """For each output the entries of the rows of this device."""
        index, number = jax.lax.axis_index(self.axes), num_devices(self.axes)
        out, start = [], 0
        for size in sizes:
            out.append(jax.lax.dynamic_slice_in_dim(x, start + index * size, size))
            start += number * size
        return out

    def jvp(self, vector: dict[str, Array]) -> Float[Array, " rows"]:
        """The product with a vector, given by parameter path; other paths count as zero."""
        tangents = self.first.tangents(vector)
        return self._joined(
            [times * x.astype(times.dtype) for times, x in zip(self._scales, tangents, strict=True)]
        )

    def parts(self, rows: Float[Array, "rows ..."]) -> list[Float[Array, "part ..."]]:
        """A vector of rows, or a matrix, by output."""
        number = num_devices(self.axes) if self.axes else 1
        sizes = [number * x.size for x in self._cotangents.kept_parts()]
        return jnp.split(rows, np.cumsum(sizes)[:-1].tolist())

    @functools.cached_property
    def scales(self) -> Float[Array, " rows"]:
        """The factor of each row."""
        return self._joined(self._scales)

    @functools.cached_property
    def _scales(self) -> list[Array]:
        """The factor of each row in the dtype of the result; 0 at masked rows."""
        if self.first.source.rows == "losses":
            raise ValueError("rows='losses' have no product with a vector: take rows='outputs'")
        return [scale.astype(self.first.dtype) for scale in self._cotangents.scales]

    def residuals(self) -> Float[Array, " rows"]:
        """The residuals, whose squared norm is twice the loss."""
        return self._joined(self.first.residuals())

    def _joined(self, parts: Sequence[Array]) -> Array:
        """One number for each row, 0 for those that the mask drops."""
        dtype = self.first.dtype
        rows = [_of_all_devices(x.astype(dtype), self.axes).ravel() for x in parts]
        return jnp.where(self.kept, jnp.concatenate(rows), jnp.zeros((), dtype))
