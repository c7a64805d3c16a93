"""Eigenbases back to factors."""

from jaxtyping import Array

from jaxkfac.curvature._eigenbases import DiagonalEigenbasis, Eigenbases
from jaxkfac.factors._factors import DiagonalFactor, KroneckerFactor
from jaxkfac.linalg import from_spectrum


def reconstruct(bases: Eigenbases) -> dict[str, KroneckerFactor | DiagonalFactor]:
    r"""The factors that the clipped eigenvalues stand for, $Q \operatorname{diag}(\lambda) Q^\top$.

    Args:
        bases: From :func:`eigendecompose`.

    Returns:
        ``{layer name: KroneckerFactor(a, g)}``, or ``DiagonalFactor(diagonal)``, readable
        like :class:`Factors`: means, diagonal sides as vectors. With
        ``max_condition=inf`` these are the factors that were decomposed, to rounding.

    Raises:
        ValueError: the bases hold no eigenvectors.

    Example:
        >>> import jax.numpy as jnp, jaxkfac as jk
        >>> params = {"kernel": jnp.ones((3, 2))}
        >>> objective = jk.Objective(lambda p, x: x @ p["kernel"], jk.Gaussian())
        >>> stats, batch = jk.value_grad_and_factors(objective), (jnp.eye(3), jnp.zeros((3, 2)))
        >>> value, grads, factors = stats(params, batch)
        >>> clipped = jk.reconstruct(jk.eigendecompose(factors, max_condition=4.0))
        >>> print(jnp.linalg.cond(clipped["kernel"].g).round(2))
        4.0
    """
    rebuilt: dict[str, KroneckerFactor | DiagonalFactor] = {}
    for layer in bases.layers:
        basis = bases.basis(layer)
        if isinstance(basis, DiagonalEigenbasis):
            rebuilt[layer.name] = DiagonalFactor(basis.diagonal)
            continue
        rebuilt[layer.name] = KroneckerFactor(
            a=_side(basis.a_values, basis.a_vectors, layer.name, dense=layer.a_dense),
            g=_side(basis.g_values, basis.g_vectors, layer.name, dense=layer.g_dense),
        )
    return rebuilt


def _side(values: Array, vectors: Array | None, name: str, *, dense: bool) -> Array:
    if not dense:
        return values
    if vectors is None:
        raise ValueError(
            f"the bases hold no eigenvectors of layer {name!r}; decompose with vectors=True"
        )
    return from_spectrum(values, vectors)
