"""Scores and logits held within bounds, and attention over such scores.

Shape suffixes: B rows, T tokens asking, S places asked, K key and value heads, G query heads for
each of them, H all query heads, d size of a head.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jaxkfac.linalg import statistics_dtype


def softcapped(x: Array, cap: float | int) -> Array:
    """``cap tanh(x / cap)``."""
    return cap * jnp.tanh(x / cap)


def softcapped_attention(
    q_BxTxHxd: Array,
    k_BxSxKxd: Array,
    v_BxSxKxd: Array,
    mask_Bx1xTxS: Bool[Array, "B 1 T S"],
    *,
    scale: float | int,
    cap: float | int,
) -> Array:
    """``jax.nn.dot_product_attention`` with soft-capped scores, which it does not have."""
    shape, wide = q_BxTxHxd.shape, statistics_dtype(q_BxTxHxd.dtype)
    q_BxTxKxGxd = q_BxTxHxd.reshape(*shape[:2], k_BxSxKxd.shape[2], -1, shape[3])
    scores_BxKxGxTxS = jnp.einsum(
        "BTKGd,BSKd->BKGTS", q_BxTxKxGxd, k_BxSxKxd, preferred_element_type=wide
    )
    scores_BxKxGxTxS = softcapped(scores_BxKxGxTxS * scale, cap)
    least = jnp.finfo(wide).min
    scores_BxKxGxTxS = jnp.where(mask_Bx1xTxS[:, :, None], scores_BxKxGxTxS, least)
    weights_BxKxGxTxS = jax.nn.softmax(scores_BxKxGxTxS, -1).astype(v_BxSxKxd.dtype)
    mixed_BxTxKxGxd = jnp.einsum("BKGTS,BSKd->BTKGd", weights_BxKxGxTxS, v_BxSxKxd)
    return mixed_BxTxKxGxd.reshape(shape)
