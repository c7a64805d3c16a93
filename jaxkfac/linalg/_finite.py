"""Whether an array is finite, by a reduction that compiles fast."""

import jax
from jaxtyping import Array, Bool, Inexact


def is_all_finite(x: Inexact[Array, "..."]) -> Bool[Array, ""]:
    """Whether every entry is finite.

    A sum of zeros, but for what is not finite: that times zero is NaN. XLA's CPU compiler takes
    0.03 s for it, and 0.1 s for ``jnp.isfinite(x).all()`` of a matrix, for which it writes all
    answers first. The largest magnitude would do as well if YNNPACK, which takes it there, handed
    on NaN (jax 0.10.2).
    """
    return (jax.lax.stop_gradient(x) * 0).sum() == 0
