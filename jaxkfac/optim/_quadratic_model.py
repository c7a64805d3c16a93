"""The quadratic model of the loss around the parameters, and where it is least."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkfac.curvature.operators import Operator
from jaxkfac.linalg import inner_product

Leaves = dict[str, Array]
Scalar = Float[Array, ""]


def dot(left: Leaves, right: Leaves, dtype: Any) -> Scalar:
    """The inner product of two trees of the same paths."""
    return inner_product(list(left.values()), [right[path] for path in left], dtype)


class QuadraticModel(NamedTuple):
    r"""$M(d) = \nabla h^\top d + \tfrac12 d^\top (F + \lambda) d$, the predicted change of $h$.

    Attributes:
        gradient: $\nabla h$ of the leaves that move, by path.
        curvature: $F$, of those and any others.
        damping: $\lambda$, with the weight decay where $h$ holds it.
    """

    gradient: Leaves
    curvature: Operator
    damping: Scalar

    def along(self, *directions: Leaves) -> tuple[Float[Array, "k k"], Float[Array, " k"]]:
        """The model's second and first derivatives in the coefficients of directions.

        Raises:
            ValueError: the curvature lacks a leaf of theirs.
        """
        dtype = self.damping.dtype
        curved = self.curvature.inner_products([self._vector(d) for d in directions])
        norms = [jnp.stack([dot(x, y, dtype) for y in directions]) for x in directions]
        slopes = jnp.stack([dot(self.gradient, d, dtype) for d in directions])
        return curved.astype(dtype) + self.damping * jnp.stack(norms), slopes

    def _vector(self, direction: Leaves) -> Leaves:
        """A direction as the operator takes it, zero where nothing moves."""
        if self.curvature.like is None:
            return direction
        shapes = self.curvature.leaves
        for path in direction:
            if path not in shapes:
                raise ValueError(
                    f"curvature: the operator has no leaf {path!r}, which kfac moves: build it of "
                    "the same parameters, jk.operators.ggn(objective, params, batch)"
                )
        return {
            p: direction[p] if p in direction else jnp.zeros(s.shape, s.dtype)
            for p, s in shapes.items()
        }


class Minimum(NamedTuple):
    """Coefficients of the step and of the last update, and the model there."""

    rate: Scalar
    momentum: Scalar
    change: Scalar


def minimum(
    second: Float[Array, "k k"],
    first: Float[Array, " k"],
    rate: Scalar | None,
    momentum: Scalar | None,
) -> Minimum:
    """Where the model is least over the step and, as second direction, the last update.

    Args:
        second: Second derivatives of the model in the coefficients.
        first: First derivatives.
        rate: The step's coefficient, where it is given.
        momentum: The last update's, where it is given.

    Returns:
        Zero for a direction that is zero, as the last update is before the first step, and for a
        last update that points along the step.
    """
    if len(first) == 1:
        second, first = jnp.pad(second, (0, 1)), jnp.pad(first, (0, 1))
    (a, b), c = second[0], second[1, 1]
    p, q = first
    # Not ``> 0``: what is not finite stays so, and the update is rejected.
    some, last = ~(a == 0), ~(c == 0)
    if rate is not None:
        along, more = rate, jnp.where(last, -(q + rate * b) / jnp.where(last, c, 1), 0)
    elif momentum is not None:
        along, more = jnp.where(some, -(p + momentum * b) / jnp.where(some, a, 1), 0), momentum
    else:
        # Of unit directions: the last update may be shorter by many orders.
        u, v = jnp.sqrt(jnp.where(some, a, 1)), jnp.sqrt(jnp.where(last, c, 1))
        cosine, p_u, q_v = b / (u * v), p / u, q / v
        independent = 1 - cosine * cosine
        both = some & last & ~(independent <= 8 * jnp.finfo(first.dtype).eps)
        sine = jnp.where(both, independent, 1)
        along = jnp.where(both, (cosine * q_v - p_u) / sine, -p_u) / u
        more = jnp.where(both, (cosine * p_u - q_v) / sine, jnp.where(some, 0, -q_v)) / v
    at = jnp.stack([along, more])
    curved = (at[:, None] * second * at).sum()
    return Minimum(along, more, (at * first).sum() + curved / 2)
