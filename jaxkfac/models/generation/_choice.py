"""One token for each row of logits."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key


@dataclasses.dataclass(frozen=True)
class TokenChoice:
    """How a token is taken.

    Attributes:
        greedy: The likeliest; else one is drawn.
        top_k: Draw among so many of the likeliest; ``None``: among all.
        top_p: Draw among the fewest of the likeliest whose probabilities sum to this at least.
    """

    greedy: bool
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k}: expected at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: expected more than 0 and at most 1")
        if self.greedy and (self.top_k, self.top_p) != (None, None):
            raise ValueError("top_k and top_p draw tokens: give a temperature and a key")


def choose(
    choice: TokenChoice,
    logits: Float[Array, "B V"],
    temperature: Float[Array, ""],
    key: Key[Array, ""],
) -> Int[Array, " B"]:
    """Ids by a choice; logits are divided by the temperature before they are cut."""
    if choice.greedy:
        return jnp.argmax(logits, -1).astype(jnp.int32)
    scaled = logits.astype(jnp.float32) / temperature
    if choice.top_k is not None:
        least = jax.lax.top_k(scaled, min(choice.top_k, scaled.shape[-1]))[0][:, -1:]
        scaled = jnp.where(scaled < least, -jnp.inf, scaled)
    if choice.top_p is not None:
        order = jnp.sort(scaled, axis=-1, descending=True)
        weights = jax.nn.softmax(order, -1)
        before = jnp.cumsum(weights, -1) - weights  # the likeliest has nothing before it
        least = jnp.min(jnp.where(before < choice.top_p, order, jnp.inf), -1, keepdims=True)
        scaled = jnp.where(scaled < least, -jnp.inf, scaled)
    return jax.random.categorical(key, scaled).astype(jnp.int32)
