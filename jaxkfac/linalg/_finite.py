"""Whether an array is finite, by a reduction that compiles fast."""

import jax
from jaxtyping import Array, Bool, Inexact


def is_all_finite(x: Inexact[Array, "..."]) -> Bool[Array, ""]:
    """Whether every entry is finite.

    A sum of zeros, but for what is not finite: that less itself is NaN. XLA's CPU compiler takes
    0.03 s for it, and 0.1 s for ``jnp.isfinite(x).all()`` of a matrix, for which it writes all
    answers first; of ``x * 0`` it writes all zeros. The largest magnitude would do as well if
    YNNPACK, which takes it there, handed on NaN (jax 0.10.2).
    """
    x = jax.lax.stop_gradient(x)
    return (x - x).sum() == 0
