"""Whether an operator is symmetric, which Lanczos takes for granted."""

import functools

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Key

from jaxkfac.curvature.operators._flat import coarsest_rounding, flatten, length
from jaxkfac.curvature.operators._operator import Operator
from jaxkfac.interception import fast_convolutions


@jax.jit
def _products(operator: Operator, vectors: Array) -> Array:
    return jax.lax.map(fast_convolutions(flatten(operator).matvec), vectors)


def asymmetry_of(operator: Operator, key: Key[Array, ""]) -> Array:
    r"""$|u^\top A v - v^\top A u|$ for random $u, v$, relative to the lengths of the products.

    Raises:
        ValueError: it is above a third of the digits of the operator's coarsest dtype, or not
            finite. Inside ``jit``, where it has no value yet, nothing is raised.
    """
    flat = flatten(operator)
    vectors = jax.random.normal(key, (2, flat.size), flat.dtype)
    (u, v), (au, av) = vectors, _products(operator, vectors)
    dot = functools.partial(jnp.vdot, precision="highest")
    left, right = dot(u, av), dot(v, au)
    lengths = length(au) + length(av)
    asymmetry = jnp.abs(left - right) / jnp.where(lengths == 0, jnp.ones((), flat.dtype), lengths)
    if isinstance(asymmetry, Tracer):
        return asymmetry
    # Random rounding errors in A v show in u'A v as their length, whatever the dimension. A
    # softmax that is nearly certain loses digits in p (v - p'v): 8e-4 was seen in float32. An
    # operator that is not symmetric gives numbers of order one.
    if not float(asymmetry) <= coarsest_rounding(operator) ** (1 / 3):
        raise ValueError(
            "Lanczos needs a symmetric operator with finite products; for random u and v "
            f"<u, A v> = {float(left):.6g} and <v, A u> = {float(right):.6g}, with "
            f"|A u| + |A v| = {float(lengths):.6g}. Pass the symmetric part, or "
            "check_symmetric=False if this is rounding"
        )
    return asymmetry
