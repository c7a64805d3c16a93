"""The loop over new tokens."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

# step(ids (B,), number of the token, state) -> logits (B, V) of the next token, state
Step = Callable[[Array, Array, Any], tuple[Array, Any]]


class Continued(NamedTuple):
    """New tokens.

    Attributes:
        ids: ``(B, steps)``, -1 behind the end of each answer.
        finite: Whether the logits of each row were finite.
    """

    ids: Int[Array, "B steps"]
    finite: Bool[Array, " B"]


def continued(
    logits: Array,
    state: Any,
    step: Step,
    take: Callable[[Array, Array], Array],
    *,
    steps: int,
    ends: Int[Array, " E"],
) -> Continued:
    """Go on from the first logits ``(B, V)`` until every row has ended.

    Args:
        logits: Of the first new token.
        state: Of the model, a cache.
        step: The model on the token before.
        take: From logits and the token's number to ids.
        steps: The most tokens.
        ends: Ids that end an answer.
    """

    def goes_on(carry: Any) -> Array:
        number, done, *_ = carry
        return (number < steps) & ~done.all()

    def one_more(carry: Any) -> Any:
        number, done, ids, state, new, finite = carry
        logits, state = step(jnp.maximum(ids, 0), number, state)
        finite &= done | is_finite(logits)
        ids = jnp.where(done, -1, take(logits, number))
        new = jax.lax.dynamic_update_slice(new, ids[:, None], (0, number))
        return number + 1, done | is_in(ids, ends), ids, state, new, finite

    ids = take(logits, jnp.zeros((), jnp.int32))
    new = jnp.full((logits.shape[0], steps), -1, jnp.int32).at[:, 0].set(ids)
    start = (jnp.ones((), jnp.int32), is_in(ids, ends), ids, state, new, is_finite(logits))
    return Continued(*jax.lax.while_loop(goes_on, one_more, start)[-2:])


def is_in(ids: Int[Array, "..."], ends: Int[Array, " E"]) -> Bool[Array, "..."]:
    """Whether ids end an answer."""
    return (ids[..., None] == ends).any(-1)


def is_finite(logits_BxV: Array) -> Array:
    """Neither NaN nor infinity in a row; -infinity may forbid tokens, but not all.

    Not by the largest: XLA's CPU library for such sums hands on no NaN (jax 0.10.2, many columns).
    """
    bad = jnp.isnan(logits_BxV) | (logits_BxV == jnp.inf)
    return jnp.isfinite(logits_BxV).any(-1) & ~bad.any(-1)
