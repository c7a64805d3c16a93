r"""Gradients of a model's outputs, whitened: their products are the outputs' covariance.

With $P$ the posterior precision, what is gathered of each layer are vectors $v_c$, linear in the
gradient $J_c$ of output $c$, such that $\langle v_c, v_d \rangle = J_c^\top P^{-1} J_d$.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkfac.interception import Layer, Slot, SlotEntry, Traced, Use
from jaxkfac.kinds import Basis
from jaxkfac.uses._example_gradients import ExampleGradients, block_dtype
from jaxkfac.uses._own_products import whole_gradients
from jaxkfac.uses._posterior_precision import PosteriorPrecision

_ENTRIES = {
    "outputs": SlotEntry(0),
    "constants": {
        "a_vectors": SlotEntry(0),
        "g_vectors": SlotEntry(0),
        "scale": SlotEntry(0),
        "bias_scale": SlotEntry(0),
    },
}

GRADIENTS = 3  # of each output alive at once: its own, the same by layer, the whitened


class OutputGradients(ExampleGradients):
    """The taps of one traced program.

    A layer that an example passes once, with one row, emits output rows: no gradient is formed.
    The others emit gradients of examples.

    Args:
        traced: The program.
        precision: The posterior precision.
        whole: Whether all layers emit gradients.
    """

    def __init__(
        self, traced: Traced, precision: PosteriorPrecision, *, whole: bool = False
    ) -> None:
        self._bases = bases = precision.bases
        dtype = functools.partial(block_dtype, bases)
        super().__init__(traced, bases.layers, dtype, traced.examples, traced.num_examples)
        self._precision = precision
        alone = set() if whole else whole_gradients(traced, bases)
        self._by_rows = {name for name in alone if self._has_one_row(self._layers[name])}

    def _has_one_row(self, layer: Layer) -> bool:
        (use,), table = self._traced.uses_of(layer), self._traced.analysis.table
        atoms = [a for axis in use.rows for a in table.atoms(axis)]
        apart = set(table.atoms(self._rows)) <= set(atoms)
        rows = math.prod(table.size(a) for a in atoms)
        return apart and rows == self._number

    @property
    def entries(self) -> Any:
        """How the entries of slots follow their parameter."""
        both = super().entries["constants"] | _ENTRIES["constants"]
        return super().entries | _ENTRIES | {"constants": both}

    @property
    def size(self) -> int:
        """How many numbers are alive for one output of one example."""
        return sum(
            math.prod(layer.stack) * layer.out_features
            if name in self._by_rows
            else GRADIENTS * layer.num_parameters
            for name, layer in self._layers.items()
        )

    def _slot(self, layer: Layer) -> Slot:
        if layer.name not in self._by_rows:
            return super()._slot(layer)
        a, g = self._bases.spectra(layer)
        scale, bias_scale = self._precision.inverse_eigenvalues(layer.name)
        constants = {
            "a_vectors": a.vectors,
            "g_vectors": g.vectors,
            "scale": scale,
            "bias_scale": bias_scale,
        }
        shape = *layer.stack, self._number, layer.out_features
        return {
            "outputs": jnp.zeros(shape, self._dtype(layer)),
            "constants": {key: x for key, x in constants.items() if x is not None},
        }

    def products(self, use: Use, like: Slot, sides: Any, constants: Slot) -> Slot:
        """What is emitted of both sides of a use."""
        if "outputs" not in like:
            return super().products(use, like, sides, constants)
        assert use.layer is not None
        ones = self._bases.wants_ones(self._layers[use.layer])
        basis = Basis(constants.get("a_vectors"), constants.get("g_vectors"), ones)
        return sides.scaled_outputs(like, basis, constants["scale"], constants.get("bias_scale"))

    def whitened(
        self, emitted: Mapping[str, Slot]
    ) -> dict[str, Float[Array, "outputs examples n"]]:
        """``{layer: vectors}`` of what several cotangents emitted, stacked along a leading axis."""
        number = len(jax.tree.leaves(emitted)[0])
        shape = number, self._number, -1
        found = {}
        for name in self._by_rows:
            rows = jnp.moveaxis(emitted[name]["outputs"], -2, 1)
            found[name] = rows.reshape(shape)
        gradients = {name: slot for name, slot in emitted.items() if name not in self._by_rows}
        if not gradients:
            return found
        leaves = jax.vmap(self.gradients)(gradients)
        many = {path: x.reshape(-1, *x.shape[2:]) for path, x in leaves.items()}
        some = tuple(layer for name, layer in self._layers.items() if name in gradients)
        for layer, parts in self._precision.solved_by_layer(many, some, -0.5):
            each = [jnp.moveaxis(x, len(layer.stack), 0) for x in parts]
            flat = jnp.concatenate([x.reshape(len(x), -1) for x in each], -1)
            found[layer.name] = flat.reshape(shape)
        return found
