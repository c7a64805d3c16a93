"""The quadratic model of the loss, its minimum, and what a batch gives to it."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float

from jaxkfac._arguments import ArrayTree, check_function
from jaxkfac._errors import instance_of
from jaxkfac.curvature.operators import Operator, ggn
from jaxkfac.factors import BatchCurvature
from jaxkfac.linalg import inner_product
from jaxkfac.optim._trees import (
    GatheredOperator,
    checked_value,
    gathered,
    is_concrete,
    sharded_like,
)

# ---------------- the quadratic model and its minimum

Leaves = dict[str, Array]
Scalar = Float[Array, ""]


def dot(x_leaves: Leaves, y_leaves: Leaves, dtype: DTypeLike) -> Scalar:
    """The inner product of two trees with the same paths."""
    return inner_product(list(x_leaves.values()), [y_leaves[path] for path in x_leaves], dtype)


class QuadraticModel(NamedTuple):
    r"""$M(d) = \nabla h^\top d + \tfrac12 d^\top (F + \lambda) d$, the predicted change of $h$.

    Attributes:
        gradient: $\nabla h$ of the leaves that move, by path.
        curvature: $F$ of these leaves, and perhaps of others.
        damping: $\lambda$, plus the weight decay if $h$ includes it.
    """

    gradient: Leaves
    curvature: Operator
    damping: Scalar

    def along(self, *directions: Leaves) -> tuple[Float[Array, "k k"], Float[Array, " k"]]:
        """The model's second and first derivatives in the coefficients of some directions.

        Raises:
            ValueError: the curvature lacks a leaf of the directions.
        """
        dtype = self.damping.dtype
        curved = self.curvature.inner_products([self._vector(d) for d in directions])
        norms = [jnp.stack([dot(x, y, dtype) for y in directions]) for x in directions]
        slopes = jnp.stack([dot(self.gradient, d, dtype) for d in directions])
        return curved.astype(dtype) + self.damping * jnp.stack(norms), slopes

    def _vector(self, direction: Leaves) -> Leaves:
        """A direction in the operator's form, zero on leaves that do not move."""
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
    """Coefficients of the step and of the last update, and the model's change there."""

    rate: Scalar
    momentum: Scalar
    change: Scalar


def minimum(
    second: Float[Array, "k k"],
    first: Float[Array, " k"],
    rate: Scalar | None,
    momentum: Scalar | None,
    *,
    bound: float = math.inf,
) -> Minimum:
    """Minimize the model over the step and, as second direction, the last update.

    Args:
        second: Second derivatives of the model in the coefficients.
        first: First derivatives.
        rate: The step's coefficient, if it is given.
        momentum: The last update's coefficient, if it is given.
        bound: Largest absolute value of a chosen momentum.

    Returns:
        The coefficients; zero for a direction that is zero, as the last update is before the first
        step, and for a last update that is parallel to the step.
    """
    if len(first) == 1:
        second, first = jnp.pad(second, (0, 1)), jnp.pad(first, (0, 1))
    (a, b), c = second[0], second[1, 1]
    p, q = first
    # Not ``> 0``: NaN has to propagate, so that the update is rejected.
    some, last = ~(a == 0), ~(c == 0)
    if rate is not None:
        along, more = rate, jnp.where(last, -(q + rate * b) / jnp.where(last, c, 1), 0)
        more = jnp.clip(more, -bound, bound)
    elif momentum is not None:
        along, more = jnp.where(some, -(p + momentum * b) / jnp.where(some, a, 1), 0), momentum
    else:
        # In unit directions, because the last update may be shorter by many orders.
        u, v = jnp.sqrt(jnp.where(some, a, 1)), jnp.sqrt(jnp.where(last, c, 1))
        cosine, p_u, q_v = b / (u * v), p / u, q / v
        independent = 1 - cosine * cosine
        both = some & last & ~(independent <= 8 * jnp.finfo(first.dtype).eps)
        sine = jnp.where(both, independent, 1)
        along = jnp.where(both, (cosine * q_v - p_u) / sine, -p_u) / u
        more = jnp.where(both, (cosine * p_u - q_v) / sine, jnp.where(some, 0, -q_v)) / v
        # At a bounded momentum the step's coefficient is the minimum along the step.
        free, more = more, jnp.clip(more, -bound, bound)
        along = jnp.where((more != free) & some, -(p + more * b) / jnp.where(some, a, 1), along)
    at = jnp.stack([along, more])
    curved = (at[:, None] * second * at).sum()
    return Minimum(along, more, (at * first).sum() + curved / 2)


# ---------------- the loss of a batch


class BatchLoss(NamedTuple):
    """The loss of an update's batch.

    Attributes:
        value: Its value, or ``None``.
        value_fn: The loss as a function of the parameters, or ``None``.
        curvature: Its curvature.
    """

    value: Any
    value_fn: Callable[[ArrayTree], Any] | None
    curvature: Operator

    @classmethod
    def of(
        cls,
        params: ArrayTree,
        value: ArrayLike | None,
        value_fn: Any,
        curvature: Any,
        *,
        reads_loss: bool,
    ) -> "BatchLoss":
        """Check the arguments that describe the loss of a batch, and collect them.

        Args:
            params: Parameters of the update.
            value: Loss of the batch.
            value_fn: The loss as a function of the parameters.
            curvature: Its operator, or what ``stats.adaptation`` gives.
            reads_loss: Whether ``value`` and ``value_fn`` are needed.

        Raises:
            TypeError: an argument of another type.
            ValueError: an argument is missing.
        """
        arguments = {"params": params, "value": value, "value_fn": value_fn, "curvature": curvature}
        optional = () if reads_loss else ("value", "value_fn")
        absent = [name for name, x in arguments.items() if x is None and name not in optional]
        if absent:
            raise ValueError(
                f"a kfac that adapts itself needs {' and '.join(absent)}: tx.update(grads, state, "
                "params, factors=factors, **stats.adaptation(params, batch, key)); or take an "
                "optimizer that needs none of them, jk.kfe_adam(0.01) or jk.kfac(0.1), as for a "
                "loss with loss_terms=, whose outputs are not known"
            )
        if value is not None:
            checked_value(value)
        if isinstance(curvature, BatchCurvature):
            curvature.check_params(params)
            curvature = as_operator(curvature)
        if value_fn is not None:
            check_function("value_fn", value_fn, "value_fn(params), the loss of this batch")
        instance_of(
            "curvature", curvature, Operator, "as jk.operators.ggn(objective, params, batch)"
        )
        return cls(value, value_fn, curvature)

    def of_whole(self, params: ArrayTree) -> "BatchLoss":
        """The same loss for parameters gathered on every device, if ``params`` are sharded."""
        value_fn = self.value_fn
        if value_fn is not None:
            local_fn = value_fn
            value_fn = lambda moved: gathered(local_fn(sharded_like(moved, params)))
        return BatchLoss(gathered(self.value), value_fn, GatheredOperator(self.curvature, params))


def as_operator(curvature: object) -> Any:
    """Build the operator of a ``BatchCurvature``; return any other operator unchanged."""
    if not isinstance(curvature, BatchCurvature):
        return curvature
    problem = curvature.loss, curvature.params, curvature.batch
    return ggn(*problem, key=curvature.key, state=curvature.state, axis_name=curvature.axes)


def check_batch(curvature: object, terms: Any, left_out: ArrayLike = 0) -> None:
    """Refuse curvature of another batch than the gradient's, if both counts are concrete.

    Args:
        curvature: An operator.
        terms: Loss terms of the gradient's batch, or ``None``.
        left_out: Micro-batches left out so far; the operator may include their terms.

    Raises:
        ValueError: the operator's batch has a different number of terms.
    """
    theirs: Any = getattr(curvature, "loss_terms", None) if is_concrete(terms) else None
    if not is_concrete(theirs):
        return
    # Python numbers, because lax.cond would trace the comparison of concrete arrays.
    theirs, terms = float(theirs), float(terms)
    # Sums of weights are no whole numbers, and round otherwise for micro-batches than for a batch.
    if not (theirs.is_integer() and terms.is_integer()) and math.isclose(
        theirs, terms, rel_tol=1e-5
    ):
        return
    if terms > 0 and (theirs < terms or (theirs > terms and not left_out)):
        raise ValueError(
            f"curvature: the operator comes from a batch of {theirs:g} loss terms, and the "
            f"gradient from {terms:g}: build it from the same batch; under jk.multi_steps from "
            f"the whole "
            f"group, like value= and value_fn="
        )
