"""Measured eigenvalues (EKFAC) as sums and counts, in eigenvectors that stay fixed."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array

from jaxkfac._arguments import ArrayTree
from jaxkfac._text import short_repr
from jaxkfac.blocks._sides import Place, Side, Sides
from jaxkfac.linalg.spectral import clip_eigenvalues


class MeasuredValues(NamedTuple):
    """Eigenvalues of one layer's block, each divided by ``root ** 2``.

    Attributes:
        values: Clipped against the largest value of each block, ``(stack..., in[+1], out)``.
        raw_values: As measured.
        root: ``(stack..., 1, 1)``; see :func:`jaxkfac.linalg.spectral.block_root`.
    """

    values: Array
    raw_values: Array
    root: Array

    __repr__ = short_repr

    @property
    def in_own_units(self) -> tuple[Array, Array]:
        """Both arrays multiplied by ``root ** 2``; 0 or infinite outside the dtype's range."""
        # One root after the other: their square may leave the range where the product does not.
        values, raw_values = (x * self.root * self.root for x in self[:2])
        return values, raw_values


class Corrections(NamedTuple):
    """Sums of squared gradients in the eigenbases; they combine by adding.

    Attributes:
        sums: ``{layer name: (stack..., in[+1], out)}``, divided by the square of the layer's
            ``Eigenbases.block_root``. For a diagonal layer the array has the shape of the diagonal
            and is not divided.
        bias_sums: ``{layer name: (stack..., out)}`` for biases with a block of their own.
        terms: Number of loss terms, scalar.
    """

    # A pytree also holds shapes, shardings and in_axes, so the leaves are not Array here.
    sums: dict[str, Any]
    bias_sums: dict[str, Any]
    terms: Any

    @property
    def sides(self) -> Sides:
        """The sums as sides: tables ``squares`` and ``bias_squares``, keyed by the layer."""
        squares = {Place("squares", name): Side(x) for name, x in self.sums.items()}
        return squares | {Place("bias_squares", k): Side(x) for k, x in self.bias_sums.items()}

    def with_sides(self, sides: Mapping[Place, Side]) -> "Corrections":
        """The same number of terms with other sums; sides of other tables are passed over."""
        tables: dict[str, dict[str, Any]] = {"squares": {}, "bias_squares": {}}
        for (table, name), side in sides.items():
            if table in tables:
                tables[table][name] = side.data
        return Corrections(tables["squares"], tables["bias_squares"], self.terms)

    def of_layer(self, name: str) -> list[Any]:
        """The sums of one layer."""
        return [table[name] for table in (self.sums, self.bias_sums) if name in table]

    def mean(self, total: Array) -> Array:
        """The eigenvalues whose sum is ``total``; 0 if there were no terms."""
        terms = jnp.where(self.terms > 0, self.terms, 1)
        return total / terms.astype(total.dtype)

    def measured(
        self, name: str, root: Array, max_condition: float, floor: float
    ) -> MeasuredValues:
        """The eigenvalues of a layer with two factors."""
        raw = self.mean(self.sums[name])
        rows = raw.reshape(*raw.shape[:-2], -1)
        clipped = clip_eigenvalues(rows, max_condition).reshape(raw.shape)
        return MeasuredValues(jnp.maximum(clipped, floor / root / root), raw, root)

    def where_any(self, measured: ArrayTree, otherwise: ArrayTree) -> ArrayTree:
        """``measured``, or the values of ``otherwise`` if there were no terms."""
        has_terms = self.terms > 0
        return jax.tree.map(
            lambda x, y: jnp.where(has_terms, x, y.astype(x.dtype)), measured, otherwise
        )

    def decayed(self, decay: ArrayLike, new: "Corrections") -> "Corrections":
        """``decay * self + new`` in the dtypes of ``self``; ``self`` if ``new`` has no terms."""
        # As in `update_average`: a step without data must not let the older ones fade to nothing.
        decay = jnp.where(new.terms > 0, decay, 1)
        return jax.tree.map(
            lambda x, y: jnp.asarray(decay, x.dtype) * x + y.astype(x.dtype), self, new
        )


@functools.singledispatch
def corrections_of(
    bases: Any, program: Any, estimator: Any, call: Any, positions: Any
) -> Corrections:
    """Measure the sums of one batch in eigenbases, in a separate pass.

    The collector calls this and knows no eigenbases; EKFAC, which stands above both, registers how
    its own are measured.

    Args:
        bases: The eigenbases, whose type decides.
        program: The ``Program`` of the objective.
        estimator: The Fisher type, with the call's labels.
        call: The parameters and the batch.
        positions: Which positions exist.
    """
    raise TypeError(f"bases: nothing is registered that measures in {type(bases).__name__}")
