"""The generalised Gauss-Newton matrix of a batch."""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Key, PyTree

from jaxkfac.curvature.operators._exact import ExactOperator, checked_batch, chosen_paths
from jaxkfac.curvature.operators._marked import marked_gauss_newton
from jaxkfac.curvature.operators._operator import Operator
from jaxkfac.curvature.operators._products import gauss_newton
from jaxkfac.factors import Objective


def ggn(
    objective: Callable[..., Any],
    params: PyTree,
    batch: Any,
    *,
    key: Key[Array, ""] | None = None,
    chunk: int | None = None,
    only: str | None = None,
    state: PyTree | None = None,
) -> Operator:
    r"""The generalised Gauss-Newton matrix of the mean loss, as an operator.

    With $J$ the Jacobian of the outputs and $H$ the Hessian of the mean loss in the outputs,

    $$ \mathrm{GGN} = J^\top H J , $$

    positive semi-definite where the loss is convex in the outputs, as all of
    ``jk.Categorical()``, ``jk.Bernoulli()`` and ``jk.Gaussian()`` are; for these it is the
    exact :func:`fisher`.

    Args:
        objective: A ``jk.Objective``, with or without ``has_aux``; or a scalar loss that marks
            its outputs (``jk.mark_outputs``), whose marks then say what it is.
        params: Parameters; integer leaves and keys are held out.
        batch: ``(inputs, targets)`` or ``(inputs, targets, mask)``; masked terms are in no
            sum and no count.
        key: For dropout: the same masks at every product. With ``chunk`` each chunk draws its
            own, so the chunk then changes the result.
        chunk: Examples at once; ``None`` is all. The result is the same to rounding.
        only: Full-match pattern over parameter paths: the operator acts on those leaves
            (adapters), its vectors are ``{path: leaf}`` of them alone, and nothing else is
            differentiated.
        state: What a call changes (batch statistics), for an ``apply_fn`` with a ``state=``
            argument; the changes are left out.

    Returns:
        An :class:`Operator`. Two forward passes and one backward pass for each product.

    Raises:
        TypeError: ``objective`` is no ``jk.Objective``, and marks no outputs.
        UnknownLayerError: ``only`` matches no parameter.
        ValueError: a batch that does not fit, or cannot be cut into chunks.

    Memory:
        Activations of one chunk for the backward pass, and two trees like the vectors.

    Example:
        >>> import jax.numpy as jnp, jaxkfac as jk
        >>> objective = jk.Objective(lambda p, x: x @ p["w"], jk.Gaussian())
        >>> params, batch = {"w": jnp.ones((3, 2))}, (3 * jnp.eye(3), jnp.zeros((3, 2)))
        >>> product = jk.operators.ggn(objective, params, batch) @ params
        >>> print(product["w"][0])
        [3. 3.]

    References:
        Nicol Schraudolph, "Fast Curvature Matrix-Vector Products for Second-Order Gradient
        Descent", 2002.
    """
    if not isinstance(objective, Objective):
        return marked_gauss_newton("ggn", objective, params, batch, key, chunk, only, state)
    parts = checked_batch(objective, params, batch, key, chunk, state=state)
    paths = chosen_paths(only, params)
    return ExactOperator(params, parts, None, key, state, objective, gauss_newton, chunk, paths)
