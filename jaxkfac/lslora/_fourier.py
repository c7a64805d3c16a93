r"""The learnable Fourier nonlinearity, the one that the adapter is named after."""

import math
from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxkfac.lslora._activation import activation, over_width
from jaxkfac.lslora._nonlinearity import Nonlinearity

SATURATED = 0.95  # |x| above which the slope of tanh, 1 - x^2, is below a tenth

# sin(pi x / 2) = x R(x^2) and cos(pi x / 2) = (1 - x^2) T(x^2) on [-1, 1], constant term first:
# Chebyshev interpolants of degree 4 in x^2, which leave 6.6e-9 and 0.9e-9 before rounding.
_R = (1.5707963200386006, -0.6459637595835207, 0.07968991832894333)
_R += (-0.004674143838021253, 0.00015167170360622396)
_T = (0.9999999991226082, -0.2337005062545816, 0.019968606206726632)
_T += (-0.0008935355013407152, 2.360068951361764e-05)


class Fourier(Nonlinearity):
    r"""$\varphi = c_0 + c_1 \hat x + c_2 \sin \pi\hat x + c_3 \cos \pi\hat x$, $\hat x = \tanh u$.

    $\hat x$ also gives the slope of tanh, so it is all that the backward pass needs.
    """

    name = "fourier"
    initial = (0.0, 1.0, 0.0, 0.0)
    formula = "φ = c0 + c1 x + c2 sin πx + c3 cos πx with x = tanh(z / σ)"
    strength_formula = "|c2| + |c3|, and 0 still leaves a tanh"
    saturated_formula = f"|x| > {SATURATED}, where tanh has lost nine tenths of its slope"

    def argument(self, u: Float[Array, "..."]) -> Float[Array, "..."]:
        return jnp.tanh(u)

    def apply(self, x: Float[Array, "..."], c: Sequence[Float[Array, "..."]]) -> Array:
        sine, cosine = sin_cos_pi(x)
        return c[0] + c[1] * x + c[2] * sine + c[3] * cosine

    def derivative(
        self, x: Float[Array, "..."], c: Sequence[Float[Array, "..."]], cotangent: Array
    ) -> tuple[Array, Sequence[Array]]:
        sine, cosine = sin_cos_pi(x)
        # Without these products XLA may keep the sine and cosine of the forward pass.
        by_sine, by_cosine = cotangent * sine, cotangent * cosine
        du = (c[1] * cotangent + math.pi * (c[2] * by_cosine - c[3] * by_sine)) * (1 - x * x)
        return du, (cotangent, cotangent * x, by_sine, by_cosine)

    def strength(self, coefficients: Float[Array, "*lead k"]) -> Float[Array, "*lead"]:
        return jnp.abs(coefficients[..., 2]) + jnp.abs(coefficients[..., 3])

    def saturated(self, x: Float[Array, "..."]) -> Bool[Array, "..."]:
        return jnp.abs(x) > SATURATED


FOURIER = Fourier()


def fourier(
    z: Float[Array, "..."],
    coefficients: Float[Array, "*lead 4"],
    sigma: Float[Array, "*lead"],
    *,
    may_be_linear: bool = False,
    forward_mode: bool = False,
) -> Float[Array, "..."]:
    r"""$\varphi(z) = c_0 + c_1 \hat x + c_2 \sin \pi\hat x + c_3 \cos \pi\hat x$.

    $\hat x = \tanh(z / (|\sigma| + 10^{-6}))$. Computed in float32 at the least: bfloat16 is off
    by up to 0.012.

    Args:
        z: Any float dtype; its leading axes are those of ``sigma``.
        coefficients: One set for each entry of the leading axes.
        sigma: Likewise.
        may_be_linear: Whether an infinite $\sigma$ stands for the identity.
        forward_mode: Leave the derivative to JAX, for ``jvp``; it keeps more.

    Returns:
        $\varphi(z)$ in float32, or in the dtype of ``z`` if that is wider.

    Memory:
        The backward pass keeps ``z``, for the gradient of ``sigma``, and $\hat x$, both in the
        dtype of the result. An adapter keeps one of the two.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxkfac.lslora import fourier
        >>> z, coefficients = jnp.array([0.0, 1.0]), jnp.array([0.5, 1, 0, 0])
        >>> [f"{value:.3f}" for value in fourier(z, coefficients, jnp.array(1.0))]
        ['0.500', '1.262']
    """
    u = over_width(sigma, z, may_be_linear)
    infinite = sigma if may_be_linear else None
    return activation(FOURIER, u, coefficients, infinite, forward_mode=forward_mode)


def sin_cos_pi(x: Float[Array, "..."]) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    r"""$\sin \pi x$ and $\cos \pi x$ for $|x| \le 1$.

    In float32 by polynomials, through the half angle; the error is below 1e-6. Other dtypes
    use the library's functions.
    """
    if x.dtype != jnp.float32:
        return jnp.sin(math.pi * x), jnp.cos(math.pi * x)
    u = x * x
    s, c = x * _horner(_R, u), (1 - u) * _horner(_T, u)
    return 2 * s * c, (c - s) * (c + s)  # as 1 - 2 s^2 the cosine has twice the error


def _horner(coefficients: tuple[float, ...], u: Array) -> Array:
    total = jnp.full_like(u, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        total = total * u + c
    return total
