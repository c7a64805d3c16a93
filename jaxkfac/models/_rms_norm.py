"""Root mean square norm."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from jaxkfac.linalg import statistics_dtype


class RMSNorm(nnx.Module):
    """Divided by the root mean square, computed in float32 at least, then scaled.

    With ``unit_offset`` the factor is 1 + scale, and that product is of float32, too.
    """

    def __init__(self, width: int, epsilon: float, *, unit_offset: bool = False) -> None:
        self.epsilon, self.unit_offset = epsilon, unit_offset
        self.scale = nnx.Param(jnp.zeros(width) if unit_offset else jnp.ones(width))

    def __call__(self, x_BxTxD: Array) -> Array:
        wide = x_BxTxD.astype(statistics_dtype(x_BxTxD.dtype))
        root = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + self.epsilon)
        if self.unit_offset:
            scale = 1 + self.scale[...].astype(wide.dtype)
            return (wide * root * scale).astype(x_BxTxD.dtype)
        return (wide * root).astype(x_BxTxD.dtype) * self.scale[...]
