"""Gradients of examples, rotated into the eigenbasis during the backward pass."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkfac.curvature import Eigenbases
from jaxkfac.curvature.per_example import ExampleGradients, block_dtype
from jaxkfac.interception import Layer, LayerVjp, Traced
from jaxkfac.interception.values import Slot
from jaxkfac.kinds import Basis, Gradients, RowSums
from jaxkfac.uses._damped_gradients import BlockDamping
from jaxkfac.uses._rotated_blocks import block_powers, rotated

# ---------------- products of gradients with themselves


class ScaledBasis(NamedTuple):
    """An eigenbasis, and factors of squared gradients in it.

    Attributes:
        basis: The eigenbasis.
        scale: ``(stack..., in[+1], out)``.
        bias_scale: ``(stack..., out)``, for a bias with a block of its own.
    """

    basis: Basis
    scale: Any
    bias_scale: Any


class OwnProducts(ExampleGradients):
    r"""The taps of one traced program: $\nabla \ell_n^\top (F + \delta)^{-1} \nabla \ell_n$.

    A layer that sees the complete gradient of its parameters in one use emits one number for each
    example, and its gradient is not stored. All other layers emit gradients.

    Args:
        traced: The program.
        bases: The eigenbases.
        damping: $\delta$.
    """

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
        scales = scale.values, bias_scale, 1 / scale.root
        scale, bias_scale, unit = jax.tree.map(lambda x: x.astype(dtype), scales)
        # Vectors are in their stored dtype: products widen them.
        basis = Basis(a, g, self._bases.wants_ones(layer), unit=unit)
        constants = ScaledBasis(basis, scale, bias_scale)
        return Slot(RowSums(jnp.zeros((*layer.stack, self._number, 1), dtype)), constants)

    def products(self, vjp: LayerVjp, like: Any, sides: Any) -> Any:
        """The statistics from both sides of a use."""
        if not isinstance(like, RowSums):
            return super().products(vjp, like, sides)
        return sides.own_products(like, *vjp.constants)

    def summed(self, emitted: Mapping[str, Any]) -> list[Float[Array, " examples"]]:
        """The products of each layer that has emitted numbers."""
        return [
            emitted[name].rows[..., 0].sum(range(len(layer.stack)))
            for name, layer in self._layers.items()
            if name in self._alone
        ]

    def remaining_gradients(
        self, emitted: Mapping[str, Any]
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
        scans = {("scan", scan) for scan in use.at.scope.scans}
        again = use.layers.count(layer.name) > 1 or not scans <= set(use.view.source.traced_indices)
        has_all_vectors = all(
            x.vectors is None or x.vectors.shape[-1] == x.vectors.shape[-2]
            for x in bases.spectra(layer)
        )
        is_read_once = all(paths.count(m.path) == 1 for m in matrices[layer.name])
        if has_all_vectors and is_read_once and not again and not use.view.history.scaled:
            names.add(layer.name)
    return names


# ---------------- rotated gradients


class RotatedGradients(ExampleGradients):
    r"""The taps of one traced program: $Q_A^\top \nabla \ell_n Q_G$.

    If a layer sees the complete gradient of its parameters in one use, either its rows or the
    gradient are rotated, whichever is less work. All other gradients are rotated after the pass.

    Args:
        traced: The program.
        bases: The eigenbases.
    """

    def __init__(self, traced: Traced, bases: Eigenbases) -> None:
        dtype = functools.partial(block_dtype, bases)
        super().__init__(traced, bases.layers, dtype, traced.examples, traced.num_examples)
        self._bases, self._alone = bases, whole_gradients(traced, bases)

    def _slot(self, layer: Layer) -> Slot:
        if layer.name not in self._alone:
            return super()._slot(layer)
        joint, dtype = self._bases.wants_ones(layer), self._dtype(layer)
        out, lead = layer.out_features, (*layer.stack, self._number)
        weight = jnp.zeros((*lead, layer.in_features + joint, out), dtype)
        own_bias = layer.bias is not None and not joint
        bias = jnp.zeros((*lead, out), dtype) if own_bias else None
        a, g = (spectrum.vectors for spectrum in self._bases.spectra(layer))
        return Slot(Gradients(weight, bias), Basis(a, g, joint))

    def products(self, vjp: LayerVjp, like: Any, sides: Any) -> Any:
        """The statistics from both sides of a use."""
        if vjp.constants is None:
            return super().products(vjp, like, sides)
        return sides.gradients(like, vjp.constants)

    def rotated(
        self, emitted: Mapping[str, Any], scale: Callable[[Array], Array]
    ) -> list[Float[Array, "..."]]:
        """Every block's rotated gradient, in the order of ``rotated_parts``.

        Args:
            emitted: What the pass has emitted.
            scale: Maps an array to the factor that it is multiplied by.
        """
        done = {name: sums.weight for name, sums in emitted.items() if name in self._alone}
        remaining = self.gradients({name: x for name, x in emitted.items() if name not in done})
        for name in done:
            layer = self._layers[name]
            if layer.bias is not None and emitted[name].bias is not None:
                self._add(remaining, layer, layer.bias, emitted[name].bias)
        return [x * scale(x) for x in rotated(remaining, self._bases, done)]
