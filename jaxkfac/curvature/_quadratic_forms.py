"""Gradients multiplied with themselves, through a damped power of the curvature."""

from collections.abc import Mapping
from typing import Any

from jaxtyping import Array, Float

from jaxkfac.curvature._damped_gradients import DampingByLayer, by_block, precondition_many
from jaxkfac.curvature._eigenbases import Eigenbases
from jaxkfac.curvature._layer_power import quadratic
from jaxkfac.curvature._owned_blocks import check_disjoint, owned_blocks


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


def _answered_once(bases: Eigenbases, leaves: Mapping[str, Any]) -> bool:
    """Whether one layer answers for each element, and for a weight and a bias that is joint."""
    shapes = {path: leaf.shape[1:] for path, leaf in leaves.items()}
    try:
        check_disjoint(owned_blocks(bases), shapes)
    except ValueError:
        return False
    return True
