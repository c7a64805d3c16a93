"""Root mean square norm."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from jaxkfac.linalg import statistics_dtype


class RMSNorm(nnx.Module):
    """Divided by the root mean square, computed in float32 at least, then scaled."""

    def __init__(self, width: int, epsilon: float) -> None:
        self.epsilon = epsilon
        self.scale = nnx.Param(jnp.ones(width))

    def __call__(self, x_BxTxD: Array) -> Array:
        wide = x_BxTxD.astype(statistics_dtype(x_BxTxD.dtype))
        root = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + self.epsilon)
        return (wide * root).astype(x_BxTxD.dtype) * self.scale[...]
