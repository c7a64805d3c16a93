"""What one backward pass gathers for each example: its gradient, or products with given queries.

Both are linear in the gradient. So contributions from a parameter's uses, a loop's iterations and
the blocks of a tied parameter add up, and no gradient has to be complete before it is multiplied.
"""

import copy
import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkfac._arguments import ArrayTree
from jaxkfac._errors import LostRowsError
from jaxkfac._jaxpr_compat import cast_varying
from jaxkfac.blocks import Origin
from jaxkfac.curvature import Eigenbases
from jaxkfac.factors import gradient_rows
from jaxkfac.interception import (
    Layer,
    LayerVjp,
    ParameterMatrix,
    Site,
    Traced,
    Use,
    kind_named,
)
from jaxkfac.interception.values import Atoms, Entries, Slot, SlotEntry
from jaxkfac.kinds import LowRankMatrices

# ---------------- matrices of many gradients


def read_many(
    leaf: Float[Array, "many ..."], matrix: ParameterMatrix, layer: Layer
) -> Float[Array, "..."]:
    """``ParameterMatrix.read`` for leaves stacked along a leading axis.

    Returns:
        ``(stack..., many, in, out)``; for a bias, ``in`` is 1.
    """

    def read(one: Array) -> Array:
        return matrix.read(one).reshape(*layer.stack, -1, layer.out_features)

    return jnp.moveaxis(jax.vmap(read)(leaf), 0, len(layer.stack))


def write_many(
    leaf: Float[Array, "many ..."], matrix: ParameterMatrix, values: Array, layer: Layer
) -> Float[Array, "many ..."]:
    """The inverse of :func:`read_many`, on the elements that the matrix covers."""
    return jax.vmap(matrix.write)(leaf, jnp.moveaxis(values, len(layer.stack), 0))


# ---------------- prepared queries


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Queries:
    """Preconditioned gradients of queries, as :func:`prepare_queries` returns them; a pytree.

    Attributes:
        whole: ``{parameter path: (Q, *parameter)}`` at full rank.
        low_rank: ``{layer name: its matrix as two factors}``, ``(Q, stack..., in, rank)`` and
            ``(Q, stack..., rank, out)``, for layers that are stored at low rank.
        errors: ``(Q, layers)``: what low rank loses of each layer's matrix, as a ratio of Frobenius
            norms; 0 where nothing is lost.
        layers: The layers, static.
        origin: Fisher type and likelihoods of the bases, static; see ``Eigenbases``.
    """

    # A pytree also holds shapes and shardings, so the leaves are not Array here.
    whole: dict[str, Any]
    low_rank: dict[str, LowRankMatrices]
    errors: Any
    layers: tuple[Layer, ...] = dataclasses.field(metadata={"static": True})
    origin: Origin | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def number(self) -> int:
        """Number of queries."""
        return len(self.errors)

    @property
    def nbytes(self) -> int:
        """Bytes of their arrays."""
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((self.whole, self.low_rank)))

    def of_weight(self, layer: Layer) -> Any:
        """``(stack..., Q, in, out)``, or its two factors."""
        if layer.name not in self.low_rank:
            return read_many(self.whole[layer.weight.path], layer.weight, layer)
        axes = len(layer.stack)
        return LowRankMatrices(*(jnp.moveaxis(x, 0, axes) for x in self.low_rank[layer.name]))

    def of_bias(self, layer: Layer) -> Any:
        """``(stack..., Q, out)``, or ``None`` for a layer without a bias."""
        if layer.bias is None:
            return None
        return read_many(self.whole[layer.bias.path], layer.bias, layer)[..., 0, :]

    def dtype(self, layer: Layer) -> Any:
        """The dtype of a layer's arrays."""
        arrays = self.low_rank.get(layer.name, self.whole.get(layer.weight.path))
        return jax.tree.leaves(arrays)[0].dtype


# ---------------- the taps


_ENTRIES = {
    "gradients": SlotEntry(1),
    "bias_gradients": SlotEntry(0),
    "scores": SlotEntry(1),
    "bias_scores": SlotEntry(0),
    "constants": {
        name: SlotEntry(0) for name in ("queries", "left_queries", "right_queries", "bias_queries")
    },
}

_EXACT = jax.lax.Precision.HIGHEST


def block_dtype(bases: Eigenbases, layer: Layer) -> Any:
    """The dtype of a layer's eigenvalues."""
    if layer.is_diagonal:
        return bases.diagonals[layer.name].dtype
    return bases.g[layer.name].values.dtype


class ExampleGradients:
    """The taps of one traced program; see ``Emitter`` in ``factors``.

    Args:
        traced: The program.
        layers: The layers that are read.
        dtype: The dtype of what is gathered for a layer.
        rows: The atoms of the axes that gradients keep: the examples, or the examples and their
            positions.
        number: Number of such rows.
        queries: Multiplied with each row's gradient; ``None`` keeps the gradient itself.
    """

    more_entries: ClassVar[Mapping[str, Any]] = {}  # further entries of a subclass

    def __init__(
        self,
        traced: Traced,
        layers: Sequence[Layer],
        dtype: Callable[[Layer], Any],
        rows: Atoms,
        number: int,
        queries: Queries | None = None,
    ) -> None:
        self._traced, self._dtype, self._queries = traced, dtype, queries
        self._rows, self._number = rows, number
        self._layers = {layer.name: layer for layer in layers}
        self._data: ArrayTree = ()

    def of(self, data: ArrayTree) -> "ExampleGradients":
        """A copy for use inside ``shard_map``, where each device has different examples.

        Args:
            data: Data of the model; the slots vary over the mesh axes over which any of it varies.
        """
        clone = copy.copy(self)
        clone._data = data
        return clone

    @property
    def entries(self) -> Entries:
        """Which entries of a slot follow the layout of their parameter."""
        elements = [x for x in self._layers.values() if x.is_elementwise]
        element_entries = (kind_named(layer.kind).entries for layer in elements)
        every = (_ENTRIES, *element_entries, self.more_entries)
        merged = {key: entry for entries in every for key, entry in entries.items()}
        constants = _ENTRIES["constants"] | self.more_entries.get("constants", {})
        return merged | {"constants": constants}

    def slots(self) -> dict[str, Slot]:
        """Zeros whose cotangents are the gathered values, and the queries for the taps."""
        return {name: self._varying(self._slot(layer)) for name, layer in self._layers.items()}

    def _varying(self, slot: Slot) -> Slot:
        """Mark a slot as varying; otherwise its cotangents would be summed over devices."""
        gathered = {key: x for key, x in slot.items() if key != "constants"}
        for leaf in jax.tree.leaves(self._data):
            gathered = {key: cast_varying(x, leaf) for key, x in gathered.items()}
        return slot | gathered

    def _slot(self, layer: Layer) -> Slot:
        dtype, stack = self._dtype(layer), layer.stack
        if layer.is_elementwise:
            shape = self._traced.part_shape(layer.weight)
            return {"gradient": jnp.zeros((*shape, self._number), dtype)}
        slot: Slot = {}
        if self._queries is None:
            sides = layer.in_features, layer.out_features
            slot["gradients"] = jnp.zeros((*stack, self._number, *sides), dtype)
            if layer.bias is not None:
                slot["bias_gradients"] = jnp.zeros((*stack, self._number, sides[1]), dtype)
            return slot
        weight, bias = self._queries.of_weight(layer), self._queries.of_bias(layer)
        zeros = jnp.zeros((*stack, self._queries.number, self._number), dtype)
        slot["scores"], constants = zeros, {"queries": weight}
        if isinstance(weight, LowRankMatrices):
            constants = {"left_queries": weight.left, "right_queries": weight.right}
        if bias is not None:
            slot["bias_scores"], constants["bias_queries"] = zeros, bias
        slot["constants"] = constants
        return slot

    # -- in the backward pass ---------------------------------------------------------

    def comes_first(self, use: Use) -> bool:
        """See ``Emitter`` in ``factors``."""
        return False

    def signature(self, site: Site, use: Use) -> Hashable:
        """See ``Emitter`` in ``factors``."""
        return None

    def emit(self, vjp: LayerVjp, like: Slot, constants: Slot | None) -> Slot:
        """See ``Emitter`` in ``factors``.

        Rows that a mask leaves out of the curvature still belong to the gradient.
        """
        constants, use = constants or {}, vjp.use
        vjp = vjp.masked_by(None)
        try:
            if use.kind.elementwise:
                return use.kind.elements(vjp, like, self._rows, constants.get("derivative"))
            sides = use.kind.both_sides(vjp, self._rows, like)
        except LostRowsError as error:
            raise LostRowsError(
                f"layer {use.layer!r} cannot be told apart by example, or with per='token' by "
                f"position, at `{vjp.site.eqn.primitive.name}`: leave it out with layers="
            ) from error
        return self.products(use, like, sides, constants)

    def products(self, use: Use, like: Slot, sides: Any, constants: Slot) -> Slot:
        """The slot's values from both sides of a use."""
        if "gradients" in like:
            return sides.gradients(like)
        queries = constants.get("queries")
        if queries is None:
            queries = LowRankMatrices(constants["left_queries"], constants["right_queries"])
        return sides.scores(like, queries, constants.get("bias_queries"))

    # -- after it ---------------------------------------------------------------------

    def gradients(self, emitted: Mapping[str, Slot]) -> dict[str, Array]:
        """``{path: (rows, *parameter)}``; elements of a parameter that no layer covers are 0."""
        leaves: dict[str, Array] = {}
        for name, slot in emitted.items():
            layer = self._layers[name]
            if layer.is_elementwise:
                self._add(leaves, layer, layer.weight, gradient_rows(layer, slot["gradient"]))
                continue
            self._add(leaves, layer, layer.weight, slot["gradients"])
            if layer.bias is not None:
                self._add(leaves, layer, layer.bias, slot["bias_gradients"])
        return leaves

    def _add(
        self, leaves: dict[str, Array], layer: Layer, matrix: ParameterMatrix, gradient: Array
    ) -> None:
        gradient = gradient.reshape(*layer.stack, self._number, -1, layer.out_features)
        shape = self._number, *self._traced.shapes[matrix.path]
        leaf = leaves.get(matrix.path, jnp.zeros(shape, gradient.dtype))
        total = read_many(leaf, matrix, layer) + gradient
        leaves[matrix.path] = write_many(leaf, matrix, total, layer)

    def scores(self, emitted: Mapping[str, Slot]) -> dict[str, Float[Array, "queries rows"]]:
        """``{layer: products of the queries with each row's gradient}``."""
        assert self._queries is not None
        by_layer = {}
        for name, layer in self._layers.items():
            slot = emitted[name]
            if layer.is_elementwise:
                rows = gradient_rows(layer, slot["gradient"])
                queries = self._queries.of_weight(layer)[..., 0, :]
                products = jnp.einsum("...no,...qo->...qn", rows, queries, precision=_EXACT)
            else:
                products = slot["scores"] + slot.get("bias_scores", 0)
            by_layer[name] = products.sum(range(len(layer.stack)))
        return by_layer
