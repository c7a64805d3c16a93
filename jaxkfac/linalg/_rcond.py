r"""The pseudo-inverse's rcond: which eigenvalues are taken for zero."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def check_rcond(rcond: float) -> None:
    """Refuse an rcond outside ``[0, 1)`` (NaN included); callers know it as ``cut=``.

    Raises:
        ValueError: naming the value.
    """
    if not 0 <= rcond < 1:
        raise ValueError(f"cut must be in [0, 1), relative to the largest eigenvalue, got {rcond}")


def above_rcond(values: Float[Array, "*stack n"], rcond: float) -> Bool[Array, "*stack n"]:
    r"""Whether $\lambda_i > c\,\lambda_{\max}$, with the largest sought on the last axis.

    Args:
        values: Raw eigenvalues in any order; negative ones count as 0.
        rcond: $c \in (0, 1)$. An all-zero row is zero whole, as in ``numpy.linalg.pinv``;
            NaN is never taken for zero, and so stays in sight.

    Returns:
        True where the eigenvalue stays.
    """
    values = jnp.maximum(values, 0)
    return ~(values <= rcond * values.max(-1, keepdims=True))


def kronecker_above_rcond(
    a_values: Float[Array, "*stack n_in"], g_values: Float[Array, "*stack n_out"], rcond: float
) -> Bool[Array, "*stack n_in n_out"]:
    r""":func:`above_rcond` for the products $\lambda_{A,i} \lambda_{G,j}$ of one block.

    Each factor is divided by its largest value first: the product of two small factors
    would underflow, and what stays must not depend on the scale of the loss.
    """
    a, g = (_relative(jnp.maximum(values, 0)) for values in (a_values, g_values))
    return ~(a[..., :, None] * g[..., None, :] <= rcond)


def _relative(values: Array) -> Array:
    largest = values.max(-1, keepdims=True)
    return values / jnp.where(largest == 0, 1, largest)
