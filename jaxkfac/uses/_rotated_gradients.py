"""Gradients of examples, rotated into the eigenbasis during the backward pass."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkfac.curvature import Eigenbases
from jaxkfac.curvature.per_example import ExampleGradients, block_dtype
from jaxkfac.interception import Layer, Traced, Use
from jaxkfac.interception.values import Slot, SlotEntry
from jaxkfac.kinds import Basis
from jaxkfac.uses._damped_gradients import BlockDamping
from jaxkfac.uses._rotated_blocks import block_powers, rotated

# ---------------- products of gradients with themselves


_PRODUCT_ENTRIES = {
    "products": SlotEntry(0),
    "constants": {
        name: SlotEntry(0) for name in ("a_vectors", "g_vectors", "unit", "scale", "bias_scale")
    },
}


class OwnProducts(ExampleGradients):
    r"""The taps of one traced program: $\nabla \ell_n^\top (F + \delta)^{-1} \nabla \ell_n$.

    A layer that sees the complete gradient of its parameters in one use emits one number for each
    example, and its gradient is not stored. All other layers emit gradients.

    Args:
        traced: The program.
        bases: The eigenbases.
        damping: $\delta$.
    """

    more_entries: ClassVar = _PRODUCT_ENTRIES

    def __init__(self, traced: Traced, bases: Eigenbases, damping: BlockDamping) -> None:
        dtype = functools.partial(block_dtype, bases)
        super().__init__(traced, bases.layers, dtype, traced.examples, traced.num_examples)
        self._bases = bases
        self._damping: Any = damping
        self._alone = whole_gradients(traced, bases)

    @property
    def gradient_layers(self) -> tuple[Layer, ...]:
        """The layers that emit gradients."""
        return tuple(x for name, x in self._layers.items() if name not in self._alone)

    def _slot(self, layer: Layer) -> Slot:
        if layer.name not in self._alone:
            return super()._slot(layer)
        dtype = self._dtype(layer)
        a, g = (x.vectors for x in self._bases.spectra(layer))
        scale, bias_scale = block_powers(self._bases, layer, self._damping)
        scales = {"bias_scale": bias_scale, "scale": scale.values, "unit": 1 / scale.root}
        vectors = {"a_vectors": a, "g_vectors": g}  # in their stored dtype: products widen them
        constants = {k: x.astype(dtype) for k, x in scales.items() if x is not None}
        return {
            "products": jnp.zeros((*layer.stack, self._number, 1), dtype),
            "constants": constants | {k: x for k, x in vectors.items() if x is not None},
        }

    def products(self, use: Use, like: Slot, sides: Any, constants: Slot) -> Slot:
        """The slot's values from both sides of a use."""
        if "products" not in like:
            return super().products(use, like, sides, constants)
        assert use.layer is not None
        ones = self._bases.wants_ones(self._layers[use.layer])
        vectors = constants.get("a_vectors"), constants.get("g_vectors")
        basis = Basis(*vectors, ones, unit=constants["unit"])
        return sides.own_products(like, basis, constants["scale"], constants.get("bias_scale"))

    def summed(self, emitted: Mapping[str, Slot]) -> list[Float[Array, " examples"]]:
        """The products of each layer that has emitted numbers."""
        return [
            emitted[name]["products"][..., 0].sum(range(len(layer.stack)))
            for name, layer in self._layers.items()
            if name in self._alone
        ]

    def remaining_gradients(
        self, emitted: Mapping[str, Slot]
    ) -> dict[str, Float[Array, "examples ..."]]:
        """The gradients of all other layers' parameters."""
        return self.gradients({layer.name: emitted[layer.name] for layer in self.gradient_layers})


def whole_gradients(traced: Traced, bases: Eigenbases) -> set[str]:
    """Layers of which one use, in one iteration, sees the complete gradient of their parameters."""
    matrices = {x.name: [m for m in (x.weight, x.bias) if m is not None] for x in bases.layers}
    paths = [m.path for both in matrices.values() for m in both]
    names = set()
    for layer in bases.layers:
        uses = traced.uses_of(layer)
        if layer.is_elementwise or not layer.a_dense or len(uses) > 1:
            continue
        (use,) = uses
        scans = {("scan", scan) for scan in use.scope}
        again = use.layers.count(layer.name) > 1 or not scans <= set(use.view.traced_indices)
        has_all_vectors = all(
            x.vectors is None or x.vectors.shape[-1] == x.vectors.shape[-2]
            for x in bases.spectra(layer)
        )
        is_read_once = all(paths.count(m.path) == 1 for m in matrices[layer.name])
        if has_all_vectors and is_read_once and not again and not use.view.scaled:
            names.add(layer.name)
    return names


# ---------------- rotated gradients


_ROTATED_ENTRIES = {
    "rotated": SlotEntry(0),
    "constants": {"a_vectors": SlotEntry(0), "g_vectors": SlotEntry(0)},
}


class RotatedGradients(ExampleGradients):
    r"""The taps of one traced program: $Q_A^\top \nabla \ell_n Q_G$.

    If a layer sees the complete gradient of its parameters in one use, either its rows or the
    gradient are rotated, whichever is less work. All other gradients are rotated after the pass.

    Args:
        traced: The program.
        bases: The eigenbases.
    """

    more_entries: ClassVar = _ROTATED_ENTRIES

    def __init__(self, traced: Traced, bases: Eigenbases) -> None:
        dtype = functools.partial(block_dtype, bases)
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
        """The slot's values from both sides of a use."""
        if "rotated" not in like:
            return super().products(use, like, sides, constants)
        assert use.layer is not None
        ones = self._bases.wants_ones(self._layers[use.layer])
        basis = Basis(constants.get("a_vectors"), constants.get("g_vectors"), ones)
        like_gradients = {"gradients": like["rotated"]}
        if "bias_gradients" in like:
            like_gradients["bias_gradients"] = like["bias_gradients"]
        emitted = sides.gradients(like_gradients, basis)
        return {"rotated": emitted.pop("gradients"), **emitted}

    def rotated(
        self, emitted: Mapping[str, Slot], scale: Callable[[Array], Array]
    ) -> list[Float[Array, "..."]]:
        """Every block's rotated gradient, in the order of ``rotated_parts``.

        Args:
            emitted: What the pass has emitted.
            scale: Maps an array to the factor that it is multiplied by.
        """
        done = {name: slot["rotated"] for name, slot in emitted.items() if "rotated" in slot}
        remaining = self.gradients({name: x for name, x in emitted.items() if name not in done})
        for name in done:
            layer = self._layers[name]
            if layer.bias is not None and "bias_gradients" in emitted[name]:
                self._add(remaining, layer, layer.bias, emitted[name]["bias_gradients"])
        return [x * scale(x) for x in rotated(remaining, self._bases, done)]
