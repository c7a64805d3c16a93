"""Token ids to rows of a table, and back to logits where the head is tied."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array


class TokenEmbedding(nnx.Module):
    """Rows by token, and the head where it is tied; in the dtype of the parameter."""

    def __init__(self, vocabulary: int, width: int, *, rngs: nnx.Rngs) -> None:
        self.embedding = nnx.Param(0.02 * jax.random.normal(rngs.params(), (vocabulary, width)))

    def __call__(self, ids_BxT: Array) -> Array:
        return jnp.take(self.embedding[...], ids_BxT, axis=0)

    def attend(self, x: Array) -> Array:
        return x @ self.embedding[...].T
