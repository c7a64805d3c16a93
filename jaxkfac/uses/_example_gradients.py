"""What one backward pass gathers of each example: its gradient, or products with given ones.

Both are linear in the gradient. So what a parameter's uses, a loop's iterations and the blocks of a
tied parameter emit adds up, and no gradient has to be whole before it is multiplied.
"""

import copy
import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from jaxkfac._errors import LostRowsError
from jaxkfac.curvature import Eigenbases, read_many, write_many
from jaxkfac.factors import Origin, gradient_rows
from jaxkfac.interception import (
    Atoms,
    Entries,
    Layer,
    Site,
    Slot,
    SlotEntry,
    Traced,
    Use,
    cast_varying,
    kind_named,
)
from jaxkfac.kinds import LowRankMatrices

# ---------------- what is held of the queries of an influence function


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Queries:
    """Preconditioned gradients of queries, as :func:`prepare_queries` gives them; a pytree.

    Attributes:
        whole: ``{parameter path: (Q, *parameter)}``.
        low_rank: ``{layer name: its matrix as two factors}``, ``(Q, stack..., in, rank)`` and
            ``(Q, stack..., rank, out)``, of layers that are held at low rank.
        errors: ``(Q, layers)``: what that loses of each layer's matrix, as a ratio of Frobenius
            norms; 0 where nothing is lost.
        layers: The layers, static.
        origin: Of which Fisher type and likelihoods the bases were, static; see ``Eigenbases``.
    """

    # A pytree also holds shapes and shardings, so the leaves are not Array here.
    whole: dict[str, Any]
    low_rank: dict[str, LowRankMatrices]
    errors: Any
    layers: tuple[Layer, ...] = dataclasses.field(metadata={"static": True})
    origin: Origin | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def number(self) -> int:
        """How many queries there are."""
        return len(self.errors)

    @property
    def nbytes(self) -> int:
        """What they take."""
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((self.whole, self.low_rank)))

    def of_weight(self, layer: Layer) -> Any:
        """``(stack..., Q, in, out)``, or two factors of it."""
        if layer.name not in self.low_rank:
            return read_many(self.whole[layer.weight.path], layer.weight, layer)
        axes = len(layer.stack)
        return LowRankMatrices(*(jnp.moveaxis(x, 0, axes) for x in self.low_rank[layer.name]))

    def of_bias(self, layer: Layer) -> Any:
        """``(stack..., Q, out)``, or ``None`` where there is no bias."""
        if layer.bias is None:
            return None
        return read_many(self.whole[layer.bias.path], layer.bias, layer)[..., 0, :]

    def dtype(self, layer: Layer) -> Any:
        """Of a layer's arrays."""
        held = self.low_rank.get(layer.name, self.whole.get(layer.weight.path))
        return jax.tree.leaves(held)[0].dtype


# ----------------


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
    """Of a layer's eigenvalues."""
    if layer.is_diagonal:
        return bases.diagonals[layer.name].dtype
    return bases.g[layer.name].values.dtype


class ExampleGradients:
    """The taps of one traced program; see ``Emitter`` in ``factors``.

    Args:
        traced: The program.
        layers: That are read.
        dtype: Of what is gathered of a layer.
        rows: The atoms of the axes along which gradients are kept apart: the examples, or the
            examples and their positions.
        number: How many such rows there are.
        queries: With which each row's gradient is multiplied; ``None``: it is kept.
    """

    more_entries: ClassVar[Mapping[str, Any]] = {}  # of a subclass, beside those of gradients

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
        self._data: PyTree = ()

    def of(self, data: PyTree) -> "ExampleGradients":
        """The same inside ``shard_map``, where each device has examples of its own.

        Args:
            data: Of the model; what is gathered varies over the axes over which any of it does.
        """
        other = copy.copy(self)
        other._data = data
        return other

    @property
    def entries(self) -> Entries:
        """How the entries of slots follow their parameter."""
        elements = [x for x in self._layers.values() if x.is_elementwise]
        own = (kind_named(layer.kind).entries for layer in elements)
        every = (_ENTRIES, *own, self.more_entries)
        found = {key: entry for entries in every for key, entry in entries.items()}
        constants = _ENTRIES["constants"] | self.more_entries.get("constants", {})
        return found | {"constants": constants}

    def slots(self) -> dict[str, Slot]:
        """Zeros, whose cotangents are what is gathered, and the queries for the taps."""
        return {name: self._varying(self._slot(layer)) for name, layer in self._layers.items()}

    def _varying(self, slot: Slot) -> Slot:
        """Cotangents of what does not vary would be summed over devices."""
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

    def emit(
        self,
        site: Site,
        use: Use,
        like: Slot,
        operands: list[Any],
        cotangent: Float[Array, "..."],
        weights: Any,
        constants: Slot | None,
    ) -> Slot:
        """See ``Emitter`` in ``factors``. Rows that a mask leaves out of the curvature are in the
        gradient all the same.
        """
        constants = constants or {}
        try:
            if use.kind.elementwise:
                (slot,) = like.values()
                whole, derivative = cotangent.astype(slot.dtype), constants.get("derivative")
                return use.kind.elements(
                    site, use, like, operands, whole, None, self._rows, derivative
                )
            sides = use.kind.both_sides(site, use, operands, cotangent, None, self._rows, like)
        except LostRowsError as error:
            raise LostRowsError(
                f"layer {use.layer!r} cannot be told apart by example, or with per='token' by "
                f"position, at `{site.eqn.primitive.name}`: leave it out with layers="
            ) from error
        return self.products(use, like, sides, constants)

    def products(self, use: Use, like: Slot, sides: Any, constants: Slot) -> Slot:
        """What is emitted of both sides of a use."""
        if "gradients" in like:
            return sides.gradients(like)
        queries = constants.get("queries")
        if queries is None:
            queries = LowRankMatrices(constants["left_queries"], constants["right_queries"])
        return sides.scores(like, queries, constants.get("bias_queries"))

    # -- after it ---------------------------------------------------------------------

    def gradients(self, emitted: Mapping[str, Slot]) -> dict[str, Array]:
        """``{path: (rows, *parameter)}``; parts of one parameter that no layer covers are 0."""
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

    def _add(self, leaves: dict[str, Array], layer: Layer, matrix: Any, part: Array) -> None:
        part = part.reshape(*layer.stack, self._number, -1, layer.out_features)
        shape = self._number, *self._traced.shapes[matrix.path]
        leaf = leaves.get(matrix.path, jnp.zeros(shape, part.dtype))
        whole = read_many(leaf, matrix, layer) + part
        leaves[matrix.path] = write_many(leaf, matrix, whole, layer)

    def scores(self, emitted: Mapping[str, Slot]) -> dict[str, Float[Array, "queries rows"]]:
        """``{layer: products of the queries with each row's gradient}``."""
        assert self._queries is not None
        found = {}
        for name, layer in self._layers.items():
            slot = emitted[name]
            if layer.is_elementwise:
                rows = gradient_rows(layer, slot["gradient"])
                queries = self._queries.of_weight(layer)[..., 0, :]
                each = jnp.einsum("...no,...qo->...qn", rows, queries, precision=_EXACT)
            else:
                each = slot["scores"] + slot.get("bias_scores", 0)
            found[name] = each.sum(range(len(layer.stack)))
        return found
