r"""The pseudo-inverse's cut: which eigenvalues are taken for zero."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def check_cut(cut: float) -> None:
    """Refuse a cut outside ``[0, 1)`` (NaN included).

    Raises:
        ValueError: naming the value.
    """
    if not 0 <= cut < 1:
        raise ValueError(f"cut must be in [0, 1), relative to the largest eigenvalue, got {cut}")


def above_cut(values: Float[Array, "*stack n"], cut: float) -> Bool[Array, "*stack n"]:
    r"""Whether $\lambda_i > c\,\lambda_{\max}$, with the largest sought on the last axis.

    Args:
        values: Raw eigenvalues in any order; negative ones count as 0.
        cut: $c \in (0, 1)$. An all-zero row is cut whole, as ``numpy.linalg.pinv`` does;
            NaN is never cut, and so stays in sight.

    Returns:
        True where the eigenvalue stays.
    """
    values = jnp.maximum(values, 0)
    return ~(values <= cut * values.max(-1, keepdims=True))


def kronecker_above_cut(
    a_values: Float[Array, "*stack n_in"], g_values: Float[Array, "*stack n_out"], cut: float
) -> Bool[Array, "*stack n_in n_out"]:
    r""":func:`above_cut` for the products $\lambda_{A,i} \lambda_{G,j}$ of one block.

    Each factor is divided by its largest value first: the product of two small factors
    would underflow, and a cut block must not depend on the scale of the loss.
    """
    a, g = (_relative(jnp.maximum(values, 0)) for values in (a_values, g_values))
    return ~(a[..., :, None] * g[..., None, :] <= cut)


def _relative(values: Array) -> Array:
    largest = values.max(-1, keepdims=True)
    return values / jnp.where(largest == 0, 1, largest)
