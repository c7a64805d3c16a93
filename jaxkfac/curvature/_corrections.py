"""Measured eigenvalues (EKFAC) as sums and counts, beside the eigenvectors they belong to."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxkfac.linalg import clip_eigenvalues


class Corrections(NamedTuple):
    """Sums of squared gradients in the eigenbases; they combine by adding.

    Attributes:
        sums: ``{layer name: (stack..., in[+1], out)}``; of a diagonal, shaped like it.
        bias_sums: ``{layer name: (stack..., out)}`` of biases with a block of their own.
        terms: Number of loss terms, scalar.
    """

    # A pytree also holds shapes, shardings and in_axes, so the leaves are not Array here.
    sums: dict[str, Any]
    bias_sums: dict[str, Any]
    terms: Any

    def mean(self, total: Array) -> Array:
        """The eigenvalues whose sum is ``total``; 0 if there were no terms."""
        terms = jnp.where(self.terms > 0, self.terms, 1)
        return total / terms.astype(total.dtype)

    def decayed(self, decay: Any, new: "Corrections") -> "Corrections":
        """``decay * self + new``, dtypes kept."""
        return jax.tree.map(
            lambda x, y: jnp.asarray(decay, x.dtype) * x + y.astype(x.dtype), self, new
        )


def clip_block(values: Array, max_condition: float, floor: float) -> Array:
    """Clip ``(stack..., in, out)``, the largest sought over each block."""
    rows = values.reshape(*values.shape[:-2], -1)
    return clip_eigenvalues(rows, max_condition, floor).reshape(values.shape)
