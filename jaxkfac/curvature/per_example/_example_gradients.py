"""What one backward pass gathers for each example: its gradient, or products with given queries.

Both are linear in the gradient. So contributions from a parameter's uses, a loop's iterations and
the blocks of a tied parameter add up, and no gradient has to be complete before it is multiplied.
"""

import copy
import dataclasses
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkfac._arguments import ArrayTree
from jaxkfac._errors import CoupledExamplesError, LostRowsError
from jaxkfac._jaxpr_compat import cast_varying
from jaxkfac.blocks import Origin
from jaxkfac.curvature import Eigenbases, covered_indices, uncovered_mask
from jaxkfac.factors import apart_remedy, gradient_rows
from jaxkfac.interception import (
    Layer,
    LayerVjp,
    ParameterMatrix,
    Site,
    Traced,
    Use,
)
from jaxkfac.interception.values import Atoms, Slot
from jaxkfac.kinds import ElementGradients, Gradients, LowRankMatrices, Scores

# ---------------- whether they exist: examples that meet, and readings left out


def refuse_meeting(names: str, met: str) -> None:
    """Refuse gradients of single examples if an example's output depends on other examples.

    Args:
        names: The layers, for the message.
        met: Where examples meet; empty if nowhere.

    Raises:
        CoupledExamplesError: with a remedy.
    """
    if not met:
        return
    if "without an example axis" in met:
        raise CoupledExamplesError(
            f"{names}: gradients of single examples are asked for, and {met}, as in a "
            "batched graph, whose nodes do not show their graph: give each example rows "
            "of its own, padded to the largest one (jax.vmap of the model over (N, nodes, "
            f"...)){apart_remedy(met)}"
        )
    raise CoupledExamplesError(
        f"{names}: gradients of single examples are asked for, and {met}. Where that is in "
        "batch statistics, use evaluation mode (Linen: use_running_average=True; NNX: "
        f"model.eval()){apart_remedy(met)}"
    )


def leaves_out_readings(traced: Traced, layers: tuple[Layer, ...]) -> bool:
    """Whether a parameter of the layers is also read outside of them."""
    paths = covered_indices(layers).keys()
    return any(
        name is None and view.source.path in paths
        for use in traced.analysis.plan.all_uses()
        if use.elements.joint is None  # a joint bias belongs to the layer of its product
        for view, name in itertools.zip_longest(use.view.source.members or (use.view,), use.layers)
    )


def check_readings(layers: tuple[Layer, ...], full_trace: Traced) -> None:
    """Refuse layers that leave out another reading of the same elements."""
    mine = covered_indices(layers)
    names = {layer.name for layer in layers}
    for layer in full_trace.table.layers:
        if layer.name in names:
            continue
        for path, indices in covered_indices([layer]).items():
            if path in mine and overlap(full_trace.shapes[path], mine[path], indices):
                raise ValueError(
                    f"layer {layer.name!r} reads the same elements of {path!r}, and is not among "
                    "the layers, so that the gradient would lack its part: choose it too, here "
                    f"and for the factors (layers={path!r} matches both of a weight), or neither"
                )


def overlap(shape: tuple[int, ...], some: set[Any], more: set[Any]) -> bool:
    """Whether slices of a parameter, given by their indices, have a common element."""
    return bool((~uncovered_mask(shape, some) & ~uncovered_mask(shape, more)).any())


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


class LayerQueries(NamedTuple):
    """The queries of one layer.

    Attributes:
        weight: ``(stack..., Q, in, out)``, or its two factors.
        bias: ``(stack..., Q, out)``; ``None`` for a layer without a bias.
    """

    weight: Any
    bias: Any


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

    def slots(self) -> dict[str, Slot]:
        """Zeros whose cotangents are the gathered values, and the queries for the taps."""
        return {name: self._varying(self._slot(layer)) for name, layer in self._layers.items()}

    def _varying(self, slot: Slot) -> Slot:
        """Mark a slot as varying; otherwise its cotangents would be summed over devices."""
        sums = slot.sums
        for leaf in jax.tree.leaves(self._data):
            sums = jax.tree.map(lambda x, leaf=leaf: cast_varying(x, leaf), sums)
        return dataclasses.replace(slot, sums=sums)

    def _slot(self, layer: Layer) -> Slot:
        dtype, stack = self._dtype(layer), layer.stack
        if layer.is_elementwise:
            shape = self._traced.part_shape(layer.weight)
            return Slot(ElementGradients(gradient=jnp.zeros((*shape, self._number), dtype)))
        if self._queries is None:
            n_in, n_out, lead = layer.in_features, layer.out_features, (*stack, self._number)
            bias = None if layer.bias is None else jnp.zeros((*lead, n_out), dtype)
            return Slot(Gradients(jnp.zeros((*lead, n_in, n_out), dtype), bias))
        queries = LayerQueries(self._queries.of_weight(layer), self._queries.of_bias(layer))
        zeros = jnp.zeros((*stack, self._queries.number, self._number), dtype)
        return Slot(Scores(zeros, None if queries.bias is None else zeros), queries)

    # -- in the backward pass ---------------------------------------------------------

    def comes_first(self, use: Use) -> bool:
        """See ``Emitter`` in ``factors``."""
        return False

    def signature(self, site: Site, use: Use) -> Hashable:
        """See ``Emitter`` in ``factors``."""
        return None

    def emit(self, vjp: LayerVjp, like: Any) -> Any:
        """See ``Emitter`` in ``factors``.

        Rows that a mask leaves out of the curvature still belong to the gradient.
        """
        vjp, use = vjp.masked_by(None), vjp.use
        kind: Any = use.kind
        try:
            if kind.elementwise:
                return kind.elements(vjp, like, self._rows)
            sides = kind.both_sides(vjp, self._rows, like.stack)
        except LostRowsError as error:
            raise LostRowsError(
                f"layer {use.layer!r} cannot be told apart by example, or with per='token' by "
                f"position, at `{vjp.site.eqn.primitive.name}`: leave it out with layers="
            ) from error
        return self.products(vjp, like, sides)

    def products(self, vjp: LayerVjp, like: Any, sides: Any) -> Any:
        """The statistics from both sides of a use."""
        if isinstance(like, Gradients):
            return sides.gradients(like)
        return sides.scores(like, *vjp.constants)

    # -- after it ---------------------------------------------------------------------

    def gradients(self, emitted: Mapping[str, Any]) -> dict[str, Array]:
        """``{path: (rows, *parameter)}``; elements of a parameter that no layer covers are 0."""
        leaves: dict[str, Array] = {}
        for name, sums in emitted.items():
            layer = self._layers[name]
            if layer.is_elementwise:
                self._add(leaves, layer, layer.weight, gradient_rows(layer, sums.gradient))
                continue
            self._add(leaves, layer, layer.weight, sums.weight)
            if layer.bias is not None:
                self._add(leaves, layer, layer.bias, sums.bias)
        return leaves

    def _add(
        self, leaves: dict[str, Array], layer: Layer, matrix: ParameterMatrix, gradient: Array
    ) -> None:
        gradient = gradient.reshape(*layer.stack, self._number, -1, layer.out_features)
        shape = self._number, *self._traced.shapes[matrix.path]
        leaf = leaves.get(matrix.path, jnp.zeros(shape, gradient.dtype))
        total = read_many(leaf, matrix, layer) + gradient
        leaves[matrix.path] = write_many(leaf, matrix, total, layer)

    def scores(self, emitted: Mapping[str, Any]) -> dict[str, Float[Array, "queries rows"]]:
        """``{layer: products of the queries with each row's gradient}``."""
        assert self._queries is not None
        by_layer = {}
        for name, layer in self._layers.items():
            sums = emitted[name]
            if layer.is_elementwise:
                rows = gradient_rows(layer, sums.gradient)
                queries = self._queries.of_weight(layer)[..., 0, :]
                products = jnp.einsum("...no,...qo->...qn", rows, queries, precision=_EXACT)
            else:
                products = sums.weight + (0 if sums.bias is None else sums.bias)
            by_layer[name] = products.sum(range(len(layer.stack)))
        return by_layer
