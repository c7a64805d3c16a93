"""Gradients of examples, rotated into the eigenbasis where they stand."""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkfac.curvature import Eigenbases, rotated
from jaxkfac.interception import Layer, Slot, SlotEntry, Traced, Use
from jaxkfac.kinds import Basis
from jaxkfac.uses._example_gradients import ExampleGradients, block_dtype
from jaxkfac.uses._own_products import whole_gradients

_ENTRIES = {
    "rotated": SlotEntry(0),
    "constants": {"a_vectors": SlotEntry(0), "g_vectors": SlotEntry(0)},
}


class RotatedGradients(ExampleGradients):
    r"""The taps of one traced program: $Q_A^\top \nabla \ell_n Q_G$.

    Where a layer sees the whole gradient of its parameters at one place, its rows are rotated, or
    the gradient, whichever is less work. The gradients of the others are rotated after the pass.

    Args:
        traced: The program.
        bases: The eigenbases.
    """

    more_entries: ClassVar = _ENTRIES

    def __init__(self, traced: Traced, bases: Eigenbases) -> None:
        def dtype(layer: Layer) -> Any:
            return block_dtype(bases, layer)

        super().__init__(traced, bases.layers, dtype, traced.examples, traced.num_examples)
        self._bases, self._alone = bases, whole_gradients(traced, bases)

    def _slot(self, layer: Layer) -> Slot:
        if layer.name not in self._alone:
            return super()._slot(layer)
        joint, dtype = self._bases.wants_ones(layer), self._dtype(layer)
        rows, out, lead = (
            layer.in_features + joint,
            layer.out_features,
            (*layer.stack, self._number),
        )
        slot: Slot = {"rotated": jnp.zeros((*lead, rows, out), dtype)}
        if layer.bias is not None and not joint:
            slot["bias_gradients"] = jnp.zeros((*lead, out), dtype)
        a, g = (spectrum.vectors for spectrum in self._bases.spectra(layer))
        vectors = {"a_vectors": a, "g_vectors": g}
        slot["constants"] = {key: x for key, x in vectors.items() if x is not None}
        return slot

    def products(self, use: Use, like: Slot, sides: Any, constants: Slot) -> Slot:
        """What is emitted of both sides of a use."""
        if "rotated" not in like:
            return super().products(use, like, sides, constants)
        assert use.layer is not None
        ones = self._bases.wants_ones(self._layers[use.layer])
        basis = Basis(constants.get("a_vectors"), constants.get("g_vectors"), ones)
        wanted = {"gradients": like["rotated"]}
        if "bias_gradients" in like:
            wanted["bias_gradients"] = like["bias_gradients"]
        found = sides.gradients(wanted, basis)
        return {"rotated": found.pop("gradients"), **found}

    def rotated(self, emitted: Mapping[str, Slot], scale: Any) -> list[Float[Array, "..."]]:
        """Every block's part, in the order of ``rotated_parts``.

        Args:
            emitted: What the pass has emitted.
            scale: From an array to what it is multiplied by.
        """
        done = {name: slot["rotated"] for name, slot in emitted.items() if "rotated" in slot}
        rest = self.gradients({name: x for name, x in emitted.items() if name not in done})
        for name in done:
            layer = self._layers[name]
            if "bias_gradients" in emitted[name]:
                self._add(rest, layer, layer.bias, emitted[name]["bias_gradients"])
        return [x * scale(x) for x in rotated(rest, self._bases, done)]
