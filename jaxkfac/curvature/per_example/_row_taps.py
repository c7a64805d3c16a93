r"""What one backward pass gathers for Gram matrices of gradients, and their products, by layer.

For input rows $a_{ns}$ and output rows $g_{ns}$ of example $n$ at position $s$, the gradient of a
layer's weight is $\sum_s a_{ns} g_{ns}^\top$, and the inner product of two examples' gradients is
$\sum_{s,t} (a_{ns}^\top a_{mt}) (g_{ns}^\top g_{mt})$. Pairs of positions thus need no gradient.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkfac._arguments import ArrayTree
from jaxkfac._errors import LostRowsError
from jaxkfac.curvature.per_example._example_gradients import (
    ExampleGradients,
    read_many,
    write_many,
)
from jaxkfac.interception import Layer, LayerVjp, ParameterMatrix, Traced, Use
from jaxkfac.interception.values import Slot, Statistic, entry, statistic
from jaxkfac.kinds import Scores
from jaxkfac.linalg import map_over_chunks

_EXACT = jax.lax.Precision.HIGHEST  # never TF32: a Gram matrix is inverted

# ---------------- which rows


class RowGroup(NamedTuple):
    """Rows of a Jacobian that belong to outputs with the same examples.

    Attributes:
        atoms: Atoms of the axis of examples.
        number: Number of examples.
        outputs: Which outputs they are, by number.
        columns: For each output its number of rows for each example; one for all together if rows
            are losses.
    """

    atoms: tuple[int, ...]
    number: int
    outputs: tuple[int, ...]
    columns: tuple[int, ...]

    @property
    def per_example(self) -> int:
        """Number of rows for each example."""
        return sum(self.columns)

    @property
    def size(self) -> int:
        """Number of rows."""
        return self.number * self.per_example


# ---------------- taps


class GroupTaps(ExampleGradients):
    """Taps of the uses that lead to the outputs of one group.

    Outputs of other examples receive no cotangents in its backward pass, so that the other uses
    contribute nothing; their rows need not run along these examples.
    """

    def __init__(
        self,
        traced: Traced,
        layers: Sequence[Layer],
        dtype: Callable[[Layer], Any],
        group: RowGroup,
    ) -> None:
        super().__init__(traced, layers, dtype, group.atoms, group.number)
        self._group = group

    def leads_there(self, use: Use) -> bool:
        """Whether a use leads to an output of the group."""
        if not self._traced.marks:
            return True
        reached = self._traced.marks_reached.get(id(use), frozenset())
        return bool(reached & {*self._group.outputs})

    def emit(self, vjp: LayerVjp, like: Any) -> Any:
        if not self.leads_there(vjp.use):
            return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), like)
        return super().emit(vjp, like)


class Probe(GroupTaps):
    """Finds the number of positions of each use, when the backward pass is traced.

    Attributes:
        positions: By the ``id`` of the use, for uses that lead to the group's outputs.
        lost: The uses whose rows cannot be attributed to examples, by ``id``.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.positions: dict[int, int] = {}
        self.lost: set[int] = set()

    def _slot(self, layer: Layer) -> Slot:
        if layer.is_elementwise:
            return super()._slot(layer)
        return Slot(Scores(jnp.zeros((*layer.stack, 1, self._number), self._dtype(layer))))

    def emit(self, vjp: LayerVjp, like: Any) -> Any:
        try:
            super().emit(vjp, like)
        except LostRowsError:
            self.lost.add(id(vjp.use))
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), like)

    def products(self, vjp: LayerVjp, like: Any, sides: Any) -> Any:
        x, _ = jax.eval_shape(sides.both_rows)
        self.positions[id(vjp.use)] = x.shape[1]
        return like


@statistic
class GatheredSides(Statistic):
    """Rows of both sides, ``(stack..., examples * positions, n)``, and tokens of an embedding.

    A constant factor of the parameter multiplies the gradient of the weight, and not that of a
    joint bias; so it belongs to the input rows. Tokens are no rows, and stand beside them.
    """

    inputs: Any = entry(1)
    outputs: Any = entry(0)
    tokens: Any = entry(0, default=None)

    @property
    def stack(self) -> tuple[int, ...]:
        return self.outputs.shape[:-2]


class RowTaps(GroupTaps):
    """Gathers the rows of some layers, and the gradients of the examples for all others.

    Args:
        traced: The program.
        layers: The layers.
        dtype: The dtype of what is gathered for a layer.
        group: The rows.
        places: For layers whose rows are gathered: by the ``id`` of each use, where its positions
            begin among those of all uses. Rows of several uses stand side by side, because
            cotangents of a slot add up.
        positions: Number of positions of all uses together, for these layers.
    """

    def __init__(
        self,
        traced: Traced,
        layers: Sequence[Layer],
        dtype: Callable[[Layer], Any],
        group: RowGroup,
        places: Mapping[str, Mapping[int, int]],
        positions: Mapping[str, int],
    ) -> None:
        super().__init__(traced, layers, dtype, group)
        self._places, self._positions = places, positions

    def _slot(self, layer: Layer) -> Slot:
        if layer.name not in self._places:
            return super()._slot(layer)
        rows = (*layer.stack, self._number * self._positions[layer.name])
        zeros = lambda features: jnp.zeros((*rows, features), self._dtype(layer))
        if layer.is_lookup:
            return Slot(GatheredSides(zeros(1), zeros(layer.out_features), zeros(1)))
        return Slot(GatheredSides(zeros(layer.in_features), zeros(layer.out_features)))

    def products(self, vjp: LayerVjp, like: Any, sides: Any) -> Any:
        if not isinstance(like, GatheredSides):
            return super().products(vjp, like, sides)
        use = vjp.use
        assert use.layer is not None
        x, g = sides.both_rows()
        start, number = self._places[use.layer][id(use)], self._positions[use.layer]

        def placed(y: Array, like: Any) -> Array:
            y = y.astype(like.dtype)
            beside = start, number - start - y.shape[1]
            y = jnp.pad(y, [(0, 0), beside, *[(0, 0)] * (y.ndim - 2)])
            return jnp.moveaxis(y, (0, 1), (-3, -2)).reshape(like.shape)

        outputs = placed(g, like.outputs)
        if like.tokens is None:
            return GatheredSides(placed(x, like.inputs), outputs)
        # A token out of range picks no row of the table; it has the number of rows in its place.
        exists = x < self._layers[use.layer].in_features
        return GatheredSides(placed(exists, like.inputs), outputs, placed(x, like.tokens))


@statistic
class JointSums(Statistic):
    """What several taps gather of one layer, in their order; ``None`` for those without it."""

    parts: Any = entry(None)

    @property
    def by_example(self) -> bool:  # type: ignore[override]
        """Whether the last axis of each array is the examples."""
        return any(part.by_example for part in self.parts if part is not None)


class JointTaps:
    """The taps of several groups in one pass, if no use leads to outputs of two of them.

    Args:
        parts: The taps of each group.
    """

    def __init__(self, parts: Sequence[GroupTaps]) -> None:
        self._parts = tuple(parts)

    def of(self, data: ArrayTree) -> "JointTaps":
        """See ``ExampleGradients``."""
        return JointTaps([cast(GroupTaps, part.of(data)) for part in self._parts])

    def slots(self) -> dict[str, Slot]:
        """The slots of all groups beside each other."""
        parts = [part.slots() for part in self._parts]
        names = dict.fromkeys(name for slots in parts for name in slots)
        return {
            name: Slot(JointSums(tuple(slots.get(name, Slot()).sums for slots in parts)))
            for name in names
        }

    def comes_first(self, use: Use) -> bool:
        """See ``Emitter`` in ``factors``."""
        return False

    def signature(self, site: Any, use: Use) -> Hashable:
        """See ``Emitter`` in ``factors``."""
        return None

    def emit(self, vjp: LayerVjp, like: JointSums) -> JointSums:
        """See ``Emitter`` in ``factors``."""
        both = zip(self._parts, like.parts, strict=True)
        return JointSums(tuple(x if x is None else part.emit(vjp, x) for part, x in both))


# ---------------- what was gathered


class LayerRows(NamedTuple):
    """Rows of one layer.

    Attributes:
        inputs: ``(stack, N, S, in)``; for an embedding ones, and ``in`` is 1.
        outputs: ``(stack, N, D, S, out)``, for D rows of the Jacobian for each example.
        tokens: ``(stack, N, S)`` for an embedding, else ``None``.
    """

    inputs: Any
    outputs: Any
    tokens: Any


class GatheredRows(NamedTuple):
    """What backward passes gathered for one group of rows.

    Attributes:
        rows: By layer, for layers whose positions are multiplied in pairs, or whose gradients are
            formed from them.
        leaves: Gradients ``(N, D, ...)`` from the backward pass, by parameter path.
        formed: Gradients ``(N, D, ...)`` that were formed from rows: by parameter path those of
            elements that several layers read, and by ``("rows", layer)`` all others.
        by_gradients: The layers whose gradients were formed.
    """

    rows: dict[str, LayerRows]
    leaves: dict[str, Array]
    formed: dict[Hashable, Array]
    by_gradients: frozenset[str] = frozenset()

    @property
    def gradients(self) -> dict[Hashable, Array]:
        """All gradients; those of one parameter are added up."""
        both = {
            path: x + self.formed[path] for path, x in self.leaves.items() if path in self.formed
        }
        return {**self.leaves, **self.formed, **both}


def gathered(
    taps: RowTaps,
    emitted: Callable[[Array], Mapping[str, Any]],
    group: RowGroup,
    layers: Mapping[str, Layer],
) -> GatheredRows:
    """Gather what the taps emit for each of the rows of an example.

    Args:
        taps: The taps.
        emitted: From the number of a row, the same for all examples, to what the taps emit.
        group: The rows.
        layers: The layers whose rows are gathered; of all others, gradients are.
    """
    columns = jnp.arange(group.per_example, dtype=jnp.int32)
    # Inputs do not depend on the row; the compiler drops what else this pass computes.
    first = emitted(columns[0]) if layers or len(columns) == 1 else {}

    def of_slots(slots: Mapping[str, Any]) -> tuple[dict[str, Array], dict[str, Array]]:
        others = {name: slot for name, slot in slots.items() if name not in layers}
        return {name: slots[name].outputs for name in layers}, taps.gradients(others)

    of_column = lambda column: of_slots(emitted(column))
    if len(columns) == 1:
        outputs, leaves = jax.tree.map(lambda x: x[None], of_slots(first))
    else:
        try:
            outputs, leaves = jax.vmap(of_column)(columns)
        except NotImplementedError:  # an operation that JAX cannot batch, as a grouped product
            outputs, leaves = jax.lax.map(of_column, columns)
    rows = {}
    for name, layer in layers.items():
        stack = math.prod(layer.stack)

        def split(x: Array, stack: int = stack) -> Array:
            return x.reshape(stack, group.number, -1, x.shape[-1])

        g = outputs[name]
        g = g.reshape(len(g), stack, group.number, -1, g.shape[-1]).transpose(1, 2, 0, 3, 4)
        tokens = split(first[name].tokens)[..., 0] if layer.is_lookup else None
        rows[name] = LayerRows(split(first[name].inputs), g, tokens)
    return GatheredRows(rows, {path: jnp.moveaxis(x, 0, 1) for path, x in leaves.items()}, {})


# ---------------- products


CHUNK_BYTES = 32 * 2**20  # of inner products of positions that are alive at once


def pair_products(
    one: LayerRows, other: LayerRows, *, weight: bool, bias: bool
) -> Float[Array, "N D M E"]:
    """Inner products of the rows' gradients of a layer, summed over pairs of positions.

    Args:
        one: Rows of the layer.
        other: Rows of the same layer, of these examples or of others.
        weight: Whether the weight counts.
        bias: Whether a joint bias counts.

    Memory:
        ``CHUNK_BYTES``, or the pairs of one example with all others.
    """

    def of_entry(one: LayerRows, other: LayerRows) -> Array:
        def some(chunk: LayerRows, _: Array | None) -> Array:
            a = jnp.zeros((), one.outputs.dtype)
            if weight:
                a = jnp.einsum("nsi,mti->nsmt", chunk.inputs, other.inputs, precision=_EXACT)
            if weight and chunk.tokens is not None:
                same = chunk.tokens[:, :, None, None] == other.tokens
                a = jnp.where(same, a, jnp.zeros((), a.dtype))
            a = a + jnp.ones((), a.dtype) if bias else a
            g = jnp.einsum("ndso,meto->ndsmet", chunk.outputs, other.outputs, precision=_EXACT)
            return (a[:, None, :, :, None] * g).sum((2, 5)) if weight else g.sum((2, 5))

        _, columns, positions, _ = one.outputs.shape
        examples, others, more, _ = other.outputs.shape
        size = positions * more * examples * (1 + columns * others) * one.outputs.dtype.itemsize
        return map_over_chunks(some, one, max(1, CHUNK_BYTES // size))

    return _over_stack(of_entry, one, other)


def pair_norms(rows: LayerRows, *, weight: bool, bias: bool) -> Float[Array, "N D"]:
    """Squared norms of the rows' gradients of a layer; see :func:`pair_products`."""

    def of_entry(rows: LayerRows) -> Array:
        def some(chunk: LayerRows, _: Array | None) -> Array:
            a = jnp.zeros((), rows.outputs.dtype)
            if weight:
                a = jnp.einsum("nsi,nti->nst", chunk.inputs, chunk.inputs, precision=_EXACT)
            if weight and chunk.tokens is not None:
                same = chunk.tokens[:, :, None] == chunk.tokens[:, None]
                a = jnp.where(same, a, jnp.zeros((), a.dtype))
            a = a + jnp.ones((), a.dtype) if bias else a
            g = jnp.einsum("ndso,ndto->ndst", chunk.outputs, chunk.outputs, precision=_EXACT)
            return (a[:, None] * g).sum((2, 3)) if weight else g.sum((2, 3))

        _, columns, positions, _ = rows.outputs.shape
        size = positions**2 * (1 + columns) * rows.outputs.dtype.itemsize
        return map_over_chunks(some, rows, max(1, CHUNK_BYTES // size))

    return _over_stack(of_entry, rows)


def _over_stack(of_entry: Callable[..., Array], *rows: LayerRows) -> Array:
    """The sum of ``of_entry`` over the entries of a stack, one after the other."""
    first = of_entry(*jax.tree.map(lambda x: x[0], rows))
    if len(rows[0].inputs) == 1:
        return first
    rest = jax.tree.map(lambda x: x[1:], rows)
    return jax.lax.scan(lambda total, entry: (total + of_entry(*entry), None), first, rest)[0]


def along_matrix(
    rows: LayerRows, weight: Float[Array, "l i o"] | None, bias: Array | None
) -> Float[Array, "N D"]:
    """Inner products of the rows' gradients of a layer with a matrix and a bias."""
    moved = jnp.zeros((), rows.outputs.dtype)
    if weight is not None and rows.tokens is None:
        moved = jnp.einsum("lnsi,lio->lnso", rows.inputs, weight, precision=_EXACT)
    elif weight is not None:
        # A token out of range picks no row of the table, and its input is 0.
        picked = jax.vmap(lambda table, at: table[at])(weight, _places(rows, weight.shape[1]))
        moved = rows.inputs * picked
    if bias is not None:
        moved = moved + bias[:, None, None, :]
    return (rows.outputs * moved[:, :, None]).sum((0, 3, 4))


def weighted_matrix(
    rows: LayerRows, x: Float[Array, "N D"], size: int, *, weight: bool, bias: bool
) -> tuple[Float[Array, "l i o"] | None, Float[Array, "l o"] | None]:
    """The sum of the rows' gradients of a layer, each times its entry of ``x``.

    Args:
        rows: Rows of the layer.
        x: One number for each row of the Jacobian.
        size: Size of the input side.
        weight: Whether the weight counts.
        bias: Whether a joint bias counts.
    """
    g = jnp.einsum("lndso,nd->lnso", rows.outputs, x, precision=_EXACT)
    matrix = None
    if weight and rows.tokens is None:
        matrix = jnp.einsum("lnsi,lnso->lio", rows.inputs, g, precision=_EXACT)
    elif weight:
        zeros = jnp.zeros((size, g.shape[-1]), g.dtype)
        add = lambda at, g: zeros.at[at.ravel()].add(g.reshape(-1, g.shape[-1]))
        matrix = jax.vmap(add)(_places(rows, size), rows.inputs * g)
    return matrix, g.sum((1, 2)) if bias else None


def _places(rows: LayerRows, size: int) -> Array:
    return jnp.clip(rows.tokens, 0, size - 1).astype(jnp.int32)


def row_gradients(rows: LayerRows, *, weight: bool, bias: bool) -> Float[Array, "N D n"]:
    """The gradients of a layer for each row of the Jacobian, flattened; see `pair_products`."""
    examples, columns = rows.outputs.shape[1:3]
    parts = []
    if weight:
        gradients = jnp.einsum("lnsi,lndso->ndlio", rows.inputs, rows.outputs, precision=_EXACT)
        parts.append(gradients.reshape(examples, columns, -1))
    if bias:
        gradients = rows.outputs.sum(3).transpose(1, 2, 0, 3)
        parts.append(gradients.reshape(examples, columns, -1))
    return jnp.concatenate(parts, -1)


def add_to_parameter(
    leaf: Float[Array, "N D *parameter"],
    layer: Layer,
    matrix: ParameterMatrix,
    gradients: Float[Array, "N D n"],
) -> Float[Array, "N D *parameter"]:
    """Add the gradients of a layer's matrix to those of its parameter."""
    shape = leaf.shape
    many = gradients.reshape(shape[0] * shape[1], *layer.stack, -1, layer.out_features)
    flat = leaf.reshape(-1, *shape[2:])
    total = read_many(flat, matrix, layer) + jnp.moveaxis(many, 0, len(layer.stack))
    return write_many(flat, matrix, total, layer).reshape(shape)


def leaf_products(
    one: Float[Array, "N D *parameter"], other: Float[Array, "M E *parameter"]
) -> Float[Array, "N D M E"]:
    """Inner products of gradients of one parameter."""
    x, y = (z.reshape(*z.shape[:2], -1) for z in (one, other))
    return jnp.einsum("ndp,mep->ndme", x, y, precision=_EXACT)
