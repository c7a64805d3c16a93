"""The outer eigenvalues of an operator, with error bounds."""

import functools
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from jaxkfac._checks import at_least_one, instance_of, one_of
from jaxkfac.curvature.operators._flat import flatten
from jaxkfac.curvature.operators._lanczos import Tridiagonal, rounding, tridiagonalise
from jaxkfac.curvature.operators._operator import Operator
from jaxkfac.curvature.operators._precision import full_precision
from jaxkfac.curvature.operators._symmetry import asymmetry_of

PyTree = Any
Which = Literal["magnitude", "largest", "smallest"]


class OperatorSpectrum(NamedTuple):
    r"""What :func:`jaxkfac.spectrum` returns.

    Attributes:
        eigenvalues: Ritz values, ``(num_eigenvalues,)``, in the order of ``which``.
        error_bounds: Within this distance of each lies an eigenvalue of the operator.
        vectors: A tree like ``operator.like`` with a leading axis of ``num_eigenvalues``,
            unit vectors; ``None`` unless asked for.
        asymmetry: $|u^\top A v - v^\top A u|$ for random $u, v$, relative to the lengths of
            the products; not a number without ``check_symmetric``.
    """

    eigenvalues: Float[Array, " k"]
    error_bounds: Float[Array, " k"]
    vectors: Any
    asymmetry: Float[Array, ""]


def spectrum(
    operator: Operator,
    num_eigenvalues: int = 20,
    *,
    key: Key[Array, ""],
    num_steps: int | None = None,
    which: Which = "magnitude",
    vectors: bool = False,
    check_symmetric: bool = True,
) -> OperatorSpectrum:
    r"""The outer eigenvalues of a symmetric operator, by Lanczos with reorthogonalisation.

    After $k$ steps from a random vector, $A Q = Q T + \beta q e_k^\top$. For an eigenpair
    $T s = \theta s$ the residual of $Qs$ is $\beta |s_k|$ long, so an eigenvalue of $A$ lies
    within $\beta |s_k|$ of $\theta$. The bounds add the rounding of $k$ products.

    Args:
        operator: A symmetric operator, definite or not.
        num_eigenvalues: How many; at most the dimension are returned.
        key: For the starting vector.
        num_steps: $k$; by default four times ``num_eigenvalues`` and 20, at most the
            dimension, at which every eigenvalue is exact to rounding. Large bounds ask for
            more.
        which: ``"magnitude"``: largest absolute value first; ``"largest"``: descending;
            ``"smallest"``: ascending.
        vectors: Whether to return the eigenvectors.
        check_symmetric: Whether to compare $u^\top A v$ with $v^\top A u$ first, two products.
            Lanczos on an operator that is not symmetric gives plausible nonsense.

    Returns:
        An :class:`OperatorSpectrum`.

    Raises:
        ImportError: ``matfree`` is not installed.
        ValueError: the operator is not symmetric to a third of the digits of its coarsest dtype, or
            its products are not finite. Inside ``jit``, where values are not known, nothing
            is raised: look at ``asymmetry``.

    Memory:
        ``num_steps`` vectors in at least float32, up to three times, beside the products'
        own.

    Example:
        >>> import jax, jax.numpy as jnp, jaxkfac as jk
        >>> matrix = jnp.diag(jnp.arange(1.0, 6.0))
        >>> operator = jk.operators.from_function(jnp.matmul, matrix, jnp.zeros(5))
        >>> found = jk.spectrum(operator, 2, key=jax.random.key(0))
        >>> print(found.eigenvalues.round(3), bool((found.error_bounds < 1e-4).all()))
        [5. 4.] True

    References:
        Cornelius Lanczos, "An Iteration Method for the Solution of the Eigenvalue Problem of
        Linear Differential and Integral Operators", 1950. Beresford Parlett, "The Symmetric
        Eigenvalue Problem", 1980.
    """
    instance_of("operator", operator, Operator, "as jk.operators.ggn(objective, params, batch)")
    one_of("which", which, get_args(Which))
    at_least_one(num_eigenvalues=num_eigenvalues)
    if num_steps is not None and num_steps < num_eigenvalues:
        raise ValueError(
            f"num_steps={num_steps} gives as many eigenvalues, and num_eigenvalues is "
            f"{num_eigenvalues}"
        )
    flat = flatten(operator)
    steps = min(num_steps or 4 * num_eigenvalues + 20, flat.size)
    count = min(num_eigenvalues, steps)
    symmetry_key, start_key, restart_key = jax.random.split(key, 3)
    asymmetry = jnp.full((), jnp.nan, flat.dtype)
    if check_symmetric:
        asymmetry = asymmetry_of(operator, symmetry_key)
    start = jax.random.normal(start_key, (flat.size,), flat.dtype)
    found = _tridiagonalise(operator, start, restart_key, steps=steps)
    order = {
        "magnitude": jnp.argsort(-jnp.abs(found.values)),
        "largest": jnp.argsort(-found.values),
        "smallest": jnp.argsort(found.values),
    }[which][:count]
    bounds = found.residual * jnp.abs(found.vectors[-1]) + rounding(found.values)
    trees = None
    if vectors:
        with full_precision():
            trees = jax.vmap(flat.unflatten)(found.vectors[:, order].T @ found.basis)
    return OperatorSpectrum(found.values[order], bounds[order], trees, asymmetry)


# Compiled once for operators of one kind and shape, as along a training run.
@functools.partial(jax.jit, static_argnames="steps")
def _tridiagonalise(operator: Operator, start: Array, key: Array, *, steps: int) -> Tridiagonal:
    return tridiagonalise(flatten(operator).matvec, start, steps, key)
