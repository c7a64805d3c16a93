"""The statistics that EKFAC gathers for each layer, and the sums of squares made from them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxkfac._mapped_axes import sum_of_varying
from jaxkfac.curvature._eigenbases import Eigenbases
from jaxkfac.curvature._layer_power import owners
from jaxkfac.factors import Statistics, gradient_rows
from jaxkfac.interception import Layer, LayerVjp, Site, Traced, Use
from jaxkfac.interception.values import Slot
from jaxkfac.kinds import (
    ArrayOrShape,
    Basis,
    BasisSquares,
    Gradients,
    in_unit,
    rotate_gradients,
)

Per = Literal["example", "token"]


class Squares(NamedTuple):
    """Sums of squares by layer.

    Attributes:
        values: ``(stack..., in[+1], out)``, of gradients divided by ``Eigenbases.block_root``; for
            a diagonal, shaped like the parameter.
        bias_values: ``(stack..., out)``, for biases with a block of their own.
    """

    values: dict[str, ArrayOrShape]
    bias_values: dict[str, ArrayOrShape]


class SquaredGradients:
    """Squared gradients of one traced program in given eigenbases.

    If an example passes a layer once, its gradient is squared in the backward pass: the slot holds
    ``BasisSquares``. If the gradient is a sum over several uses or iterations of a loop, no single
    use sees all of it: the slot holds ``Gradients`` by example, which are squared after the pass.
    The same applies to a parameter that is read in two orientations, such as a tied embedding
    and head: the block that owns it (``owners``: the head) sees the sum of both uses, and the other
    block its own use only.

    Args:
        traced: The program.
        bases: The eigenbases; their layers are read.
        per: What is squared: the gradient of an example, or of each of its positions.
    """

    def __init__(self, traced: Traced, bases: Eigenbases, per: Per) -> None:
        self._traced, self._per, self._bias = traced, per, bases.bias
        self._layers = {x.name: x for x in bases.layers if x.is_covered and x.name in traced.table}
        by_position = Statistics(traced, bases.bias, "expand")
        by_example = Statistics(traced, bases.bias, "reduce")
        self._of_examples = by_example.of_examples
        # A full block always comes from gradients of whole examples, whatever ``per`` is.
        self._elements = {
            name: by_example if per == "example" or layer.g_dense else by_position
            for name, layer in self._layers.items()
            if layer.is_elementwise
        }
        self._tied_blocks = {} if per == "token" else _tied_blocks(bases.layers, self._layers)
        self._slots = {name: self._slot(layer, bases) for name, layer in self._layers.items()}

    def slots(self) -> dict[str, Slot]:
        """Zeros whose cotangents are the statistics, and the eigenvectors for the taps."""
        return self._slots

    def _slot(self, layer: Layer, bases: Eigenbases) -> Slot:
        if layer.name in self._elements:
            return self._elements[layer.name].slot(layer)
        for use in self._traced.uses_of(layer):
            if masked := use.view.history.masked:
                raise ValueError(
                    f"layer {layer.name!r} is masked by a constant in `{masked}`, so its "
                    "gradient is no product of rows in any basis: leave it out of the bases that "
                    "are measured, with layers= of value_grad_and_factors"
                )
        a, g = bases.spectra(layer)
        stack, n_out, dtype = layer.stack, layer.out_features, g.values.dtype
        # The square of a sum is not the sum of its parts' squares: the parts are added first.
        if self._sums_first(layer):
            rows = (*stack, self._traced.num_examples)
            weight = self._of_examples(jnp.zeros((*rows, layer.in_features, n_out), dtype))
            bias = self._of_examples(jnp.zeros((*rows, n_out), dtype)) if layer.bias else None
            return Slot(Gradients(weight, bias))
        weight = jnp.zeros((*stack, a.values.shape[-1], n_out), dtype)
        bias = jnp.zeros((*stack, n_out), dtype) if self._has_own_bias(layer) else None
        scaled = any(use.view.history.scaled for use in self._traced.uses_of(layer))
        constant = jnp.ones(stack, dtype) if scaled else None
        ones, unit = self._has_ones(layer), bases.block_root(layer)
        return Slot(BasisSquares(weight, bias), Basis(a.vectors, g.vectors, ones, constant, unit))

    def _sums_first(self, layer: Layer) -> bool:
        """Whether an example's gradient is a sum over uses, or over iterations of a loop."""
        uses = self._traced.uses_of(layer)
        if self._per == "token":
            return False
        if any(layer.name in (owner, *tied) for owner, tied in self._tied_blocks.items()):
            return True
        scans = {("scan", scan) for scan in uses[0].at.scope.scans}
        if uses[0].layers.count(layer.name) > 1:  # it occurs twice in a stack of parameters
            return True
        return len(uses) > 1 or not scans <= set(uses[0].view.source.traced_indices)

    def _has_ones(self, layer: Layer) -> bool:
        return layer.bias is not None and self._bias == "joint"

    def _has_own_bias(self, layer: Layer) -> bool:
        return layer.bias is not None and self._bias == "separate"

    # -- in the backward pass ---------------------------------------------------------

    def comes_first(self, use: Use) -> bool:
        """See ``_taps.Emitter``."""
        return False

    def signature(self, site: Site, use: Use) -> None:
        """See ``_taps.Emitter``."""
        return

    def emit(self, vjp: LayerVjp, like: Any) -> Any:
        """See ``_taps.Emitter``."""
        assert vjp.use.layer is not None
        layer = self._layers[vjp.use.layer]
        if layer.name in self._elements:
            return self._elements[layer.name].emit(vjp, like)
        examples = self._traced.examples if self._per == "example" else None
        kind: Any = vjp.use.kind
        sides = kind.both_sides(vjp, examples, like.stack)
        if isinstance(like, Gradients):
            return sides.gradients(like)
        return sides.squares(like, vjp.constants)

    # -- after it ---------------------------------------------------------------------

    def outputs(self, emitted: Mapping[str, Any], bases: Eigenbases) -> Squares:
        """Sums of squares of one backward pass.

        They add up over vector-Jacobian products.
        """
        values, bias_values = {}, {}
        for name, layer in self._layers.items():
            sums = emitted[name]
            if name in self._elements:
                values[name] = self._of_elements(layer, sums, bases)
                continue
            a, g = (spectrum.vectors for spectrum in bases.spectra(layer))
            root = bases.block_root(layer)
            bias = sums.bias
            if isinstance(sums, BasisSquares):
                values[name] = sums.weight
            else:
                gradient = sums.weight
                for tied in self._tied_blocks.get(name, ()):
                    gradient = gradient + self._reoriented(tied, layer, emitted[tied].weight)
                if bias is not None and self._has_ones(layer):
                    gradient, bias = jnp.concatenate([gradient, bias[..., None, :]], -2), None
                values[name] = _squared(gradient, a, g, root)
                if bias is not None:
                    bias = _squared(bias[..., None, :], None, g, root)[..., 0, :]
            if bias is not None:  # a separate block, whose squares are in the dtype's range
                bias_values[name] = bias * root[..., 0] * root[..., 0]
        return sum_of_varying(Squares(values, bias_values))

    def _reoriented(self, name: str, layer: Layer, gradient: ArrayOrShape) -> ArrayOrShape:
        """Gradients by example of another block of the same parameter, in this block's layout."""
        mine, its = (replace(x.weight, index=()) for x in (layer, self._layers[name]))
        zeros = jnp.zeros(mine.atoms, gradient.dtype)

        def read(one: ArrayOrShape) -> ArrayOrShape:
            return mine.read(its.write(zeros, one))

        return jax.vmap(read, in_axes=-3, out_axes=-3)(gradient)

    def _of_elements(self, layer: Layer, sums: Any, bases: Eigenbases) -> ArrayOrShape:
        if not layer.g_dense:
            return self._elements[layer.name].output(layer, sums)
        rows = gradient_rows(layer, sums.gradient)[..., None, :]
        vectors = bases.spectra(layer)[1].vectors
        return _squared(rows, None, vectors, bases.block_root(layer))


def _tied_blocks(layers: Sequence[Layer], covered: Mapping[str, Layer]) -> dict[str, list[str]]:
    """For each block that owns a parameter, the names of its other blocks."""
    blocks: dict[Any, list[str]] = {}
    for layer in covered.values():
        if not layer.is_elementwise:
            blocks.setdefault((layer.weight.path, layer.weight.index), []).append(layer.name)
    first = {owner.layer.name for owner in owners(tuple(layers)) if owner.writes_weight}
    return {
        name: [tied for tied in names if tied != name]
        for names in blocks.values()
        for name in names
        if name in first and len(names) > 1
    }


def _squared(
    gradient: ArrayOrShape, a: ArrayOrShape | None, g: ArrayOrShape | None, unit: ArrayOrShape
) -> ArrayOrShape:
    """``(stack..., examples, in, out)`` rotated, squared and summed: ``(stack..., in, out)``."""
    return jnp.square(in_unit(rotate_gradients(gradient, a, g), unit)).sum(-3)
