"""The Hessian of a batch's loss."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Key, PyTree

from jaxkfac.curvature.operators._exact import (
    ExactOperator,
    checked_batch,
    chosen_paths,
    chosen_shapes,
)
from jaxkfac.curvature.operators._operator import Operator
from jaxkfac.curvature.operators._products import Leaves, hessian_product
from jaxkfac.factors import Objective, returned
from jaxkfac.interception import check_arrays, check_function, leaves_by_path, with_leaves
from jaxkfac.linalg import statistics_dtype


def hessian(
    objective: Callable[..., Any],
    params: PyTree,
    batch: Any,
    *,
    key: Key[Array, ""] | None = None,
    chunk: int | None = None,
    only: str | None = None,
    has_aux: bool = False,
    state: PyTree | None = None,
) -> Operator:
    r"""The Hessian $\nabla^2 L$ of the mean loss, as an operator; it may be indefinite.

    Args:
        objective: A ``jk.Objective``, or any scalar loss ``fn(params, batch)``, with a
            ``key=`` argument or without.
        params: Parameters; integer leaves and keys are held out.
        batch: As for :func:`ggn`; whatever the function takes, for a scalar loss.
        key: For dropout, as for :func:`ggn`.
        chunk: Examples at once, as for :func:`ggn`; not for a scalar loss, whose terms
            cannot be counted.
        only: Full-match pattern over parameter paths, as for :func:`ggn`.
        has_aux: Whether a scalar loss returns ``(value, aux)``; an ``Objective`` says so
            itself.
        state: What a call changes, as for :func:`ggn`; of a scalar loss its ``state=``.

    Returns:
        An :class:`Operator`. One gradient, differentiated forward, for each product.

    Raises:
        UnknownLayerError: ``only`` matches no parameter.
        ValueError: a batch that does not fit, or ``chunk`` with a scalar loss.

    Memory:
        About twice that of one chunk's gradient.

    Example:
        >>> import jax.numpy as jnp, jaxkfac as jk
        >>> cubes = lambda params, batch: (params["w"] ** 3).sum() * batch
        >>> hessian = jk.operators.hessian(cubes, {"w": jnp.arange(3.0)}, 2.0)
        >>> print((hessian @ {"w": jnp.ones(3)})["w"])
        [ 0. 12. 24.]

    References:
        Barak Pearlmutter, "Fast Exact Multiplication by the Hessian", 1994.
    """
    paths = chosen_paths(only, params)
    if isinstance(objective, Objective):
        parts = checked_batch(objective, params, batch, key, chunk, state=state)
        return ExactOperator(
            params, parts, None, key, state, objective, hessian_product, chunk, paths
        )
    check_function("objective", objective, "loss(params, batch), or a jk.Objective")
    check_arrays("params", params)
    if chunk is not None:
        raise ValueError(
            "chunk: a scalar loss does not show how many terms a chunk holds; give a "
            "jk.Objective, or pass chunk=None"
        )
    return ScalarHessian(params, batch, key, state, objective, has_aux, paths)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ScalarHessian(Operator):
    """The Hessian of a scalar loss ``fn(params, batch)``; attributes as in ``hessian``."""

    params: Any
    batch: Any
    key: Any
    state: Any
    function: Callable[..., Any] = dataclasses.field(metadata={"static": True})
    has_aux: bool = dataclasses.field(metadata={"static": True})
    only: tuple[str, ...] | None = dataclasses.field(metadata={"static": True})

    @property
    def like(self) -> PyTree:
        return chosen_shapes(self.params, self.only)

    def product(self, leaves: Leaves) -> Leaves:
        return _product(self, leaves)


@jax.jit
def _product(operator: ScalarHessian, leaves: Leaves) -> Leaves:
    found = leaves_by_path(operator.params)
    chosen = {path: found[path] for path in operator.leaves}
    vector = {path: leaves[path].astype(x.dtype) for path, x in chosen.items()}

    def loss(chosen: Leaves) -> Array:
        params = with_leaves(operator.params, chosen)
        args = (params, operator.batch)
        return returned(
            "the loss", operator.function, args, operator.key, operator.state, operator.has_aux
        )[0]

    out = jax.jvp(jax.grad(loss), (chosen,), (vector,))[1]
    return {path: x.astype(statistics_dtype(x.dtype)) for path, x in out.items()}
