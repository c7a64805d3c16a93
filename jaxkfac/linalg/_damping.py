"""Damped powers of Kronecker-structured eigenvalues."""

import math
from typing import Any, Literal, get_args

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

DampingMode = Literal["exact", "factored", "pi"]
Damping = ArrayLike | tuple[ArrayLike, ArrayLike]


def check_damping(damping: Any, mode: str) -> None:
    """Refuse an unknown mode and, where its value is known, a negative or NaN damping.

    A traced damping cannot be looked at and passes.

    Raises:
        ValueError: naming the argument and its value.
    """
    if mode not in get_args(DampingMode):
        raise ValueError(
            f"damping_mode must be one of {get_args(DampingMode)}, got {mode!r}; for one "
            "damping per factor pass damping=(damping_a, damping_g)"
        )
    parts = damping if isinstance(damping, tuple) else (damping,)
    if isinstance(damping, tuple) and len(parts) != 2:
        raise ValueError(f"a pair is damping=(damping_a, damping_g), got {len(parts)} values")
    for part in parts:
        if np.shape(part) != ():
            raise ValueError(
                f"damping: expected a number, or a pair (damping_a, damping_g) as a tuple, got "
                f"shape {np.shape(part)}"
            )
        if not isinstance(part, Tracer) and not float(part) >= 0:
            raise ValueError(f"damping must be zero or positive, got {damping}")


def power_or_zero(values: Float[Array, "*shape"], power: float) -> Float[Array, "*shape"]:
    """``values**power``, with 0 for 0 at every power: the pseudo-inverse's convention."""
    exponent = int(power) if math.isfinite(power) and power == int(power) else power
    zero = values == 0
    return jnp.where(zero, 0, jnp.where(zero, 1, values) ** exponent)


def kronecker_power(
    a_values: Float[Array, "*stack n_in"],
    g_values: Float[Array, "*stack n_out"],
    *,
    power: float,
    damping: Damping = 0.0,
    mode: DampingMode = "exact",
    kept: Bool[Array, "*stack n_in n_out"] | None = None,
) -> Float[Array, "*stack n_in n_out"]:
    r"""Eigenvalues of the damped power of $A \otimes G$, one for each element of the matrix.

    With $\delta$ the damping and $p$ the power,

    * exact: $(\lambda_A \lambda_G + \delta)^p$
    * factored: $((\lambda_A + \sqrt\delta)(\lambda_G + \sqrt\delta))^p$
    * pi: $((\lambda_A + \pi\sqrt\delta)(\lambda_G + \sqrt\delta/\pi))^p$ with
      $\pi^2 = \overline{\lambda_A} / \overline{\lambda_G}$, the ratio of the mean
      eigenvalues, or 1 where either mean is 0
    * a pair $(\delta_A, \delta_G)$: $((\lambda_A + \delta_A)(\lambda_G + \delta_G))^p$,
      whatever the mode

    Args:
        a_values: Eigenvalues of the input factor; negative ones count as 0.
        g_values: Eigenvalues of the output factor, same dtype and stack.
        power: $p$, static. A damped eigenvalue of 0 gives 0 at every power.
        damping: $\delta \ge 0$ in units of $\lambda_A\lambda_G$, or a pair in the units of
            each factor; may be traced.
        mode: How one damping is spread over the two factors.
        kept: False where the eigenvalue counts as 0 whatever its value and the damping,
            see :func:`jaxkfac.linalg.kronecker_above_rcond`; ``None`` keeps all.

    Returns:
        The scale of every element in the eigenbasis, dtype of ``a_values``.

    Raises:
        ValueError: unknown mode or negative damping.

    References:
        Martens and Grosse, Optimizing neural networks with Kronecker-factored approximate
        curvature, 2015, section 6.3 (the factored forms).
    """
    check_damping(damping, mode)
    a, g = jnp.maximum(a_values, 0), jnp.maximum(g_values, 0)
    if not isinstance(damping, tuple) and mode == "exact":
        delta = jnp.asarray(damping, a.dtype)
        damped = a[..., :, None] * g[..., None, :] + delta
        return power_or_zero(damped if kept is None else jnp.where(kept, damped, 0), power)
    to_a, to_g = _per_factor(a, g, damping, mode)
    # Raised before they are multiplied: n_in + n_out powers instead of n_in * n_out.
    a, g = power_or_zero(a + to_a, power), power_or_zero(g + to_g, power)
    scale = a[..., :, None] * g[..., None, :]
    return scale if kept is None else jnp.where(kept, scale, 0)


def kronecker_damping(
    a_values: Float[Array, "*stack n_in"],
    g_values: Float[Array, "*stack n_out"],
    *,
    damping: Damping = 0.0,
    mode: DampingMode = "exact",
) -> Float[Array, "..."]:
    r"""What each form of damping adds to $\lambda_A \lambda_G$, broadcasting against the matrix.

    With per-factor dampings $\delta_A, \delta_G$ (of a pair, or of ``"factored"`` and ``"pi"``)
    this is $\delta_A \lambda_G + \lambda_A \delta_G + \delta_A \delta_G$; exact damping adds
    $\delta$. So measured eigenvalues, which are no products, are damped as their products
    would be. The arguments are those of :func:`kronecker_power`.
    """
    check_damping(damping, mode)
    a, g = jnp.maximum(a_values, 0), jnp.maximum(g_values, 0)
    if not isinstance(damping, tuple) and mode == "exact":
        return jnp.asarray(damping, a.dtype)
    to_a, to_g = (x[..., None] if x.ndim else x for x in _per_factor(a, g, damping, mode))
    a, g = a[..., :, None], g[..., None, :]
    return to_a * g + a * to_g + to_a * to_g


def _per_factor(a: Array, g: Array, damping: Damping, mode: str) -> tuple[Array, Array]:
    """What is added to each factor's eigenvalues, ``()`` or ``(stack..., 1)``."""
    if isinstance(damping, tuple):
        to_a, to_g = (jnp.asarray(d, a.dtype) for d in damping)
        return to_a, to_g
    root = jnp.sqrt(jnp.asarray(damping, a.dtype))
    return (root, root) if mode == "factored" else _pi_split(a, g, root)


def _pi_split(a: Array, g: Array, root: Array) -> tuple[Array, Array]:
    mean_a, mean_g = a.mean(-1, keepdims=True), g.mean(-1, keepdims=True)
    usable = (mean_a > 0) & (mean_g > 0)
    pi = jnp.where(usable, jnp.sqrt(jnp.where(usable, mean_a, 1) / jnp.where(usable, mean_g, 1)), 1)
    return root * pi, root / pi


def diagonal_power(
    values: Float[Array, "*shape"],
    *,
    power: float,
    damping: Damping = 0.0,
    kept: Bool[Array, "*shape"] | None = None,
) -> Float[Array, "*shape"]:
    r"""$(\lambda + \delta)^p$ for a block of a single factor: a diagonal, or a lone bias's G.

    There is nothing to spread the damping over, so every mode is the exact one; of a pair
    the second, $\delta_G$, is added, because the block is made of output gradients. Where
    ``kept`` is False the value counts as 0.
    """
    delta = damping[1] if isinstance(damping, tuple) else damping
    damped = jnp.maximum(values, 0) + jnp.asarray(delta, values.dtype)
    return power_or_zero(damped if kept is None else jnp.where(kept, damped, 0), power)
