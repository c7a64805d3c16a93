r"""The learnable nonlinearity $\varphi$, with a derivative that keeps $z$ only.

Written with library functions, $\varphi$ keeps tanh, sine and cosine for its backward pass, and
its five scalar gradients read them again. Here the backward pass starts from $z$.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkfac.linalg._gram import statistics_dtype

EPSILON = 1e-6  # keeps z / (|sigma| + EPSILON) finite

# sin(pi x / 2) = x R(x^2) and cos(pi x / 2) = (1 - x^2) T(x^2) on [-1, 1], constant term first:
# Chebyshev interpolants of degree 4 in x^2, which leave 6.6e-9 and 0.9e-9 before rounding.
_R = (1.5707963200386006, -0.6459637595835207, 0.07968991832894333)
_R += (-0.004674143838021253, 0.00015167170360622396)
_T = (0.9999999991226082, -0.2337005062545816, 0.019968606206726632)
_T += (-0.0008935355013407152, 2.360068951361764e-05)


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
        forward_mode: Leave the derivative to JAX, for ``jvp``; it keeps more than $z$.

    Returns:
        $\varphi(z)$ in float32, or in the dtype of ``z`` if that is wider.

    Memory:
        The backward pass keeps ``z`` in its own dtype.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxkfac.lslora import fourier
        >>> z, coefficients = jnp.array([0.0, 1.0]), jnp.array([0.5, 1, 0, 0])
        >>> [f"{value:.3f}" for value in fourier(z, coefficients, jnp.array(1.0))]
        ['0.500', '1.262']
    """
    function = _value if forward_mode else _fourier
    return function(may_be_linear, z, coefficients, sigma)


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


def squashed(z: Array, sigma: Array) -> Array:
    r"""$\hat x$, in float32 at the least."""
    z = z.astype(statistics_dtype(z.dtype))
    return jnp.tanh(z / (jnp.abs(_over(sigma, z)) + EPSILON))


def _over(x: Array, z: Array) -> Array:
    """A value for each entry of the leading axes of ``z``, ready to broadcast."""
    return x.astype(z.dtype).reshape(*x.shape, *[1] * (z.ndim - x.ndim))


def _value(may_be_linear: bool, z: Array, coefficients: Array, sigma: Array) -> Array:
    z = z.astype(statistics_dtype(z.dtype))
    x = squashed(z, sigma)
    sine, cosine = sin_cos_pi(x)
    c = [_over(coefficients[..., k], z) for k in range(4)]
    out = c[0] + c[1] * x + c[2] * sine + c[3] * cosine
    return jnp.where(jnp.isinf(_over(sigma, z)), z, out) if may_be_linear else out


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fourier(may_be_linear: bool, z: Array, coefficients: Array, sigma: Array) -> Array:
    return _value(may_be_linear, z, coefficients, sigma)


def _forward(may_be_linear: bool, z: Array, coefficients: Array, sigma: Array):
    return _value(may_be_linear, z, coefficients, sigma), (z, coefficients, sigma)


def _backward(may_be_linear: bool, saved: tuple[Array, Array, Array], cotangent: Array):
    z, coefficients, sigma = saved
    x = squashed(z, sigma)
    sine, cosine = sin_cos_pi(x)
    c = [_over(coefficients[..., k], x) for k in range(4)]
    slope = c[1] + math.pi * (c[2] * cosine - c[3] * sine)
    width = jnp.abs(_over(sigma, x)) + EPSILON
    dz = cotangent * slope * (1 - x * x) / width
    linear = jnp.isinf(_over(sigma, x)) if may_be_linear else None
    curved = cotangent if linear is None else jnp.where(linear, 0, cotangent)
    # d(z / width) / d sigma = -sign(sigma) z / width^2; the constant factor comes after the sum.
    parts = (curved, curved * x, curved * sine, curved * cosine, dz * z.astype(x.dtype))
    # Five reductions of one shape over shared operands: XLA makes one pass of them.
    sums = [part.sum(tuple(range(sigma.ndim, x.ndim))) for part in parts]
    d_coefficients = jnp.stack(sums[:4], -1).astype(coefficients.dtype)
    wide = sigma.astype(x.dtype)
    d_sigma = -jnp.sign(wide) * sums[4] / (jnp.abs(wide) + EPSILON)
    if linear is not None:
        dz = jnp.where(linear, cotangent, dz)
        d_sigma = jnp.where(jnp.isinf(wide), 0, d_sigma)
    return dz.astype(z.dtype), d_coefficients, d_sigma.astype(sigma.dtype)


_fourier.defvjp(_forward, _backward)
