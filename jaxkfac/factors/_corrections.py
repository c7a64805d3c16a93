"""Measured eigenvalues (EKFAC) as sums and counts, beside the eigenvectors they belong to."""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Key, PyTree

from jaxkfac.interception import Layer


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

    def decayed(self, decay: ArrayLike, new: "Corrections") -> "Corrections":
        """``decay * self + new``, dtypes kept."""
        return jax.tree.map(
            lambda x, y: jnp.asarray(decay, x.dtype) * x + y.astype(x.dtype), self, new
        )


@runtime_checkable
class Measurable(Protocol):
    """Eigenbases, in which gradients are squared."""

    @property
    def layers(self) -> tuple[Layer, ...]: ...

    def measured(
        self,
        program: Any,
        estimator: Any,
        params: PyTree,
        batch: Any,
        key: Key[Array, ""] | None,
        positions: Any,
        state: PyTree | None,
    ) -> Corrections:
        """The sums of one batch, in a pass of its own.

        Args:
            program: The ``Program`` of the objective.
            estimator: The Fisher type, with the call's labels.
            params: The parameters.
            batch: The batch.
            key: The call's own.
            positions: Which positions exist.
            state: What a call of the model changes.
        """
        ...
