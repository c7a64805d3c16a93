r"""A nonlinearity applied to an array, with a derivative that keeps one array.

Written with library functions, $\varphi$ keeps all it computes for its backward pass: tanh, sine
and cosine. Here that starts from $x$ alone, and $\sigma$ stays outside: where $z$ is a product, as
in an adapter, $1 / (|\sigma| + \epsilon)$ multiplies the smaller of its operands, and neither
$\sigma$ nor its gradient costs a pass over $z$.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkfac.linalg import statistics_dtype
from jaxkfac.lslora._nonlinearity import Nonlinearity

EPSILON = 1e-6  # keeps z / (|sigma| + EPSILON) finite


def activation(
    phi: Nonlinearity,
    u: Float[Array, "..."],
    coefficients: Float[Array, "*lead k"],
    sigma: Float[Array, "*lead"] | None = None,
    *,
    forward_mode: bool = False,
) -> Float[Array, "..."]:
    r"""$\varphi$ of $u = z / (|\sigma| + 10^{-6})$, in float32 at the least.

    Args:
        phi: The nonlinearity.
        u: Any float dtype; its leading axes are those of the coefficients.
        coefficients: One set for each entry of the leading axes.
        sigma: Passed only where an infinite one stands for the identity.
        forward_mode: Leave the derivative to JAX, for ``jvp``; it keeps more.

    Memory:
        The backward pass keeps one array of the size and dtype of ``u``.
    """
    out = (_primal if forward_mode else _activation)(phi, u, coefficients)
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


def over_width(
    sigma: Float[Array, "*lead"], z: Float[Array, "..."], may_be_linear: bool = False
) -> Float[Array, "..."]:
    r"""$u = z / (|\sigma| + 10^{-6})$, in float32 at the least."""
    return z.astype(statistics_dtype(z.dtype)) / width(sigma, z, may_be_linear)


def _argument(phi: Nonlinearity, u: Array) -> Array:
    return phi.argument(u.astype(statistics_dtype(u.dtype)))


def _over(x: Array, z: Array) -> Array:
    """A value for each entry of the leading axes of ``z``, ready to broadcast."""
    wide = statistics_dtype(z.dtype)
    return x.astype(wide).reshape(*x.shape, *[1] * (z.ndim - x.ndim))


def _each(coefficients: Array, x: Array) -> list[Array]:
    return [_over(coefficients[..., k], x) for k in range(coefficients.shape[-1])]


# Traced once for all adapters of a shape.
@functools.partial(jax.jit, static_argnums=0)
def _value(phi: Nonlinearity, x: Array, coefficients: Array) -> Array:
    return phi.apply(x, _each(coefficients, x))


@functools.partial(jax.jit, static_argnums=0)
def _derivative(
    phi: Nonlinearity, x: Array, coefficients: Array, cotangent: Array
) -> tuple[Array, Array]:
    du, products = phi.derivative(x, _each(coefficients, x), cotangent)
    rows = tuple(range(coefficients.ndim - 1, x.ndim))
    return du, jnp.stack([product.sum(rows) for product in products], -1)


def _primal(phi: Nonlinearity, u: Array, coefficients: Array) -> Array:
    return _value(phi, _argument(phi, u), coefficients)


def _forward(phi: Nonlinearity, u: Array, coefficients: Array) -> tuple[Array, tuple[Array, Array]]:
    x = _argument(phi, u)
    kept = x if x.dtype == u.dtype else u  # half the bytes, and then x is computed once more
    return _value(phi, x, coefficients), (kept, coefficients)


def _backward(
    phi: Nonlinearity, saved: tuple[Array, Array], cotangent: Array
) -> tuple[Array, Array]:
    kept, coefficients = saved
    # Without the barrier what apply computed, sine and cosine say, are common subexpressions, which
    # a program that is no scan keeps.
    kept = jax.lax.optimization_barrier(kept)
    x = kept if kept.dtype == cotangent.dtype else _argument(phi, kept)
    du, sums = _derivative(phi, x, coefficients, cotangent)
    return du.astype(kept.dtype), sums.astype(coefficients.dtype)


_activation = jax.custom_vjp(_primal, nondiff_argnums=(0,))
_activation.defvjp(_forward, _backward)
