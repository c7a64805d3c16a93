"""Gradients multiplied with themselves, through a damped power of the curvature."""

from collections.abc import Mapping
from typing import Any

import jax
from jaxtyping import Array, Float

from jaxkfac.curvature._damped_gradients import (
    BlockDamping,
    DampingByLayer,
    by_block,
    of_bias,
    of_block,
    precondition_many,
)
from jaxkfac.curvature._eigenbases import Eigenbases, KroneckerEigenbasis
from jaxkfac.curvature._layer_power import (
    Power,
    powered_eigenvalues,
    powered_output_eigenvalues,
    quadratic,
)
from jaxkfac.curvature._owned_blocks import check_disjoint, owned_blocks
from jaxkfac.interception import Layer
from jaxkfac.linalg import ScaledPower


def quadratic_forms(
    gradients: Mapping[str, Float[Array, "many ..."]],
    bases: Eigenbases,
    damping: DampingByLayer,
    power: float = -1.0,
) -> Float[Array, " many"]:
    r"""$\nabla_m^\top (F + \delta)^p \nabla_m$ for gradients stacked along a leading axis.

    Where every element has one block that answers for it, the blocks' parts are weighed sums of
    squares in the eigenbasis, with half the products that :func:`precondition_many` takes. Else
    that is what is multiplied.

    Args:
        gradients: As for :func:`precondition_many`, like all that follows.
        bases: The eigenbases.
        damping: $\delta$.
        power: $p$.

    Memory:
        Some copies of the gradients of the largest layer, or of one of its iterations.
    """
    if not _answered_once(bases, gradients):
        solved = precondition_many(gradients, bases, damping, power)
        parts = [(gradients[path] * x).reshape(len(x), -1).sum(-1) for path, x in solved.items()]
    else:
        parts = [
            part.sum(range(len(layer.stack)))
            for layer, both in by_block(gradients, bases, damping, power, quadratic)
            for part in both
            if part is not None
        ]
    return sum(parts[1:], parts[0])


def block_powers(
    bases: Eigenbases, layer: Layer, damping: BlockDamping, power: float = -1.0
) -> tuple[ScaledPower, Array | None]:
    r"""$(\lambda + \delta)^p$ of a layer's block, and of a bias that has one of its own.

    Args:
        bases: The eigenbases.
        layer: One with two factors.
        damping: $\delta$, as for :func:`precondition_many`.
        power: $p$.

    Returns:
        ``(stack..., in[+1], out)``, by a root that gradients are multiplied by, and
        ``(stack..., out)`` or ``None``.
    """
    basis = bases.basis(layer)
    assert isinstance(basis, KroneckerEigenbasis)
    own_bias = layer.bias is not None and not bases.wants_ones(layer)

    def one(basis: KroneckerEigenbasis) -> tuple[ScaledPower, Array | None]:
        both = Power(power, of_block(basis, damping), "exact", 0.0)
        own = Power(power, of_bias(basis, damping), "exact", 0.0)
        bias = powered_output_eigenvalues(basis, own) if own_bias else None
        return powered_eigenvalues(basis, both), bias

    for _ in layer.stack:
        one = jax.vmap(one)
    return one(basis)


def _answered_once(bases: Eigenbases, leaves: Mapping[str, Any]) -> bool:
    """Whether one layer answers for each element, and for a weight and a bias that is joint."""
    shapes = {path: leaf.shape[1:] for path, leaf in leaves.items()}
    try:
        check_disjoint(owned_blocks(bases), shapes)
    except ValueError:
        return False
    return True
