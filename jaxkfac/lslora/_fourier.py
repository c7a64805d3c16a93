r"""The learnable nonlinearity $\varphi$, with a derivative that keeps one array.

Written with library functions, $\varphi$ keeps tanh, sine and cosine for its backward pass.
Here that starts from $\hat x$, which also gives the slope of tanh, and $\sigma$ stays outside:
where $z$ is a product, as in an adapter, $1 / (|\sigma| + \epsilon)$ multiplies the smaller of its
operands, and neither $\sigma$ nor its gradient costs a pass over $z$.
"""

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
        forward_mode: Leave the derivative to JAX, for ``jvp``; it keeps more.

    Returns:
        $\varphi(z)$ in float32, or in the dtype of ``z`` if that is wider.

    Memory:
        The backward pass keeps ``z``, for the gradient of ``sigma``, and $\hat x$, both in the
        dtype of the result. An adapter keeps one of the two: see :func:`curve`.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxkfac.lslora import fourier
        >>> z, coefficients = jnp.array([0.0, 1.0]), jnp.array([0.5, 1, 0, 0])
        >>> [f"{value:.3f}" for value in fourier(z, coefficients, jnp.array(1.0))]
        ['0.500', '1.262']
    """
    u = z.astype(statistics_dtype(z.dtype)) / width(sigma, z, may_be_linear)
    return curve(u, coefficients, sigma if may_be_linear else None, forward_mode=forward_mode)


def curve(
    u: Float[Array, "..."],
    coefficients: Float[Array, "*lead 4"],
    sigma: Float[Array, "*lead"] | None = None,
    *,
    forward_mode: bool = False,
) -> Float[Array, "..."]:
    r"""$\varphi$ of $u = z / (|\sigma| + 10^{-6})$, in float32 at the least.

    Args:
        u: Any float dtype; its leading axes are those of the coefficients.
        coefficients: See :func:`fourier`.
        sigma: Given only where an infinite one stands for the identity.
        forward_mode: See :func:`fourier`.

    Memory:
        The backward pass keeps one array of the size and dtype of ``u``.
    """
    out = _value(_bounded(u), coefficients) if forward_mode else _curve(u, coefficients)
    if sigma is None:
        return out
    return jnp.where(jnp.isinf(_over(sigma, out)), u.astype(out.dtype), out)


def width(
    sigma: Float[Array, "*lead"], z: Float[Array, "..."], may_be_linear: bool = False
) -> Float[Array, "..."]:
    r"""$|\sigma| + 10^{-6}$, or 1 for an infinite $\sigma$ that stands for the identity.

    In float32 at the least, ready to broadcast over ``z``.
    """
    sigma = _over(sigma, z)
    found = jnp.abs(sigma) + EPSILON
    return jnp.where(jnp.isinf(sigma), 1, found) if may_be_linear else found


def squashed(z: Float[Array, "..."], sigma: Float[Array, "*lead"]) -> Float[Array, "..."]:
    r"""$\hat x$, in float32 at the least."""
    return _bounded(z.astype(statistics_dtype(z.dtype)) / width(sigma, z))


def _bounded(u: Array) -> Array:
    return jnp.tanh(u.astype(statistics_dtype(u.dtype)))


def _over(x: Array, z: Array) -> Array:
    """A value for each entry of the leading axes of ``z``, ready to broadcast."""
    wide = statistics_dtype(z.dtype)
    return x.astype(wide).reshape(*x.shape, *[1] * (z.ndim - x.ndim))


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


def _value(x: Array, coefficients: Array) -> Array:
    sine, cosine = sin_cos_pi(x)
    c = [_over(coefficients[..., k], x) for k in range(4)]
    return c[0] + c[1] * x + c[2] * sine + c[3] * cosine


@jax.custom_vjp
def _curve(u: Array, coefficients: Array) -> Array:
    return _value(_bounded(u), coefficients)


def _forward(u: Array, coefficients: Array):
    x = _bounded(u)
    kept = x if x.dtype == u.dtype else u  # half the bytes, and then tanh once more
    return _value(x, coefficients), (kept, coefficients)


def _backward(saved: tuple[Array, Array], cotangent: Array):
    kept, coefficients = saved
    # Without the barrier the forward pass's sine and cosine are common subexpressions, which a
    # program that is no scan keeps; without the products with the cotangent XLA may compute them
    # again at once, and keep them all the same.
    kept = jax.lax.optimization_barrier(kept)
    x = kept if kept.dtype == cotangent.dtype else _bounded(kept)
    sine, cosine = sin_cos_pi(x)
    by_sine, by_cosine = cotangent * sine, cotangent * cosine
    c = [_over(coefficients[..., k], x) for k in range(4)]
    du = (c[1] * cotangent + math.pi * (c[2] * by_cosine - c[3] * by_sine)) * (1 - x * x)
    rows = tuple(range(coefficients.ndim - 1, x.ndim))
    sums = [part.sum(rows) for part in (cotangent, cotangent * x, by_sine, by_cosine)]
    return du.astype(kept.dtype), jnp.stack(sums, -1).astype(coefficients.dtype)


_curve.defvjp(_forward, _backward)
