"""Eigenbases back to factors."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxkfac.curvature._batch import is_small, map_in_batches
from jaxkfac.curvature._eigenbases import Eigenbases, KroneckerEigenbasis, check_bases
from jaxkfac.factors import DiagonalFactor, KroneckerFactor
from jaxkfac.linalg import Spectrum, from_spectrum

_Place = tuple[str, str, bool]  # side, the name it is stored under, with the ones column


def reconstruct(bases: Eigenbases) -> dict[str, KroneckerFactor | DiagonalFactor]:
    r"""The factors that the clipped eigenvalues stand for, $Q \operatorname{diag}(\lambda) Q^\top$.

    Args:
        bases: From :func:`eigendecompose`.

    Returns:
        ``{layer name: KroneckerFactor(a, g)}``, or ``DiagonalFactor(diagonal)``, readable
        like :class:`Factors`: means, diagonal sides as vectors. With
        ``max_condition=inf`` these are the factors that were decomposed, to rounding.
        Layers that share an input share the rebuilt A; small sides of equal size are rebuilt
        in one batched product.

    Raises:
        ValueError: the bases hold no eigenvectors, or are corrected
            (:func:`correct_eigenvalues`): no two factors have measured eigenvalues.

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
    check_bases(bases)
    if bases.corrections is not None:
        raise ValueError(
            "these bases hold measured eigenvalues, which are no products of two factors' "
            "eigenvalues: reconstruct the bases that were given to correct_eigenvalues, or "
            "apply the measured curvature with apply_power"
        )
    sides: dict[_Place, tuple[None, Spectrum]] = {}
    places: dict[str, tuple[_Place, _Place]] = {}
    for layer in bases.layers:
        if layer.is_diagonal:
            continue
        basis = bases.basis(layer)
        assert isinstance(basis, KroneckerEigenbasis)
        a, g = ("a", layer.input, bases.wants_ones(layer)), ("g", layer.name, False)
        places[layer.name] = a, g
        _check(basis.a_vectors, layer.name, dense=layer.a_dense)
        _check(basis.g_vectors, layer.name, dense=layer.g_dense)
        # Eigenvectors may be in host memory.
        sides[a] = None, jax.tree.map(jnp.asarray, Spectrum(basis.a_values, basis.a_vectors))
        sides[g] = None, jax.tree.map(jnp.asarray, Spectrum(basis.g_values, basis.g_vectors))
    small = {
        place: side
        for place, side in sides.items()
        if side[1].values.ndim == 1 and is_small(side[1].values.shape[-1])
    }
    matrices = map_in_batches(lambda _, side: _side(side), small)
    matrices |= {place: _side(side) for place, (_, side) in sides.items() if place not in small}
    return {
        layer.name: DiagonalFactor(bases.diagonal_basis(layer).diagonal)
        if layer.is_diagonal
        else KroneckerFactor(*(matrices[place] for place in places[layer.name]))
        for layer in bases.layers
    }


def _side(side: Spectrum) -> Array:
    values, vectors = side
    return values if vectors is None else from_spectrum(values, vectors)


def _check(vectors: Array | np.ndarray | None, name: str, *, dense: bool) -> None:
    if dense and vectors is None:
        raise ValueError(
            f"the bases hold no eigenvectors of layer {name!r}; decompose with vectors=True"
        )
