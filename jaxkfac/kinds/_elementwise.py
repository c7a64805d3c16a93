"""What kinds without an input side have in common: each element meets data by itself."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp

from jaxkfac.interception import Atoms, Axes, Kind, Site, Slot, SlotEntry, Use
from jaxkfac.kinds._moments import sum_to
from jaxkfac.kinds._rows import ArrayOrShape, Rows, by_example, masked


class Elementwise(Kind):
    """A kind whose block is the diagonal of its gradients, or one dense matrix of them.

    A new one says how it is found (``find``), and gives ``gradient``.
    """

    entries: ClassVar = {
        "diagonal": SlotEntry(2),  # squared gradients of the parameter
        "count": SlotEntry(0),
        "gradient": SlotEntry(1, by_example=True),
        "counts": SlotEntry(0, by_example=True),
    }
    rank = 2
    elementwise = True

    def place(self, use: Use, axes: Axes) -> None:
        use.result = axes

    def elements(
        self,
        site: Site,
        use: Use,
        like: Mapping[str, Any],
        operands: Sequence[Any],
        cotangent: ArrayOrShape,
        weights: ArrayOrShape | None,
        examples: Atoms,
        derivative: ArrayOrShape | None,
    ) -> Slot:
        dtype = cotangent.dtype
        ones = masked(jnp.ones(cotangent.shape, dtype), weights)
        gradient = self.gradient(use, operands, masked(cotangent, weights))
        if derivative is not None:
            gradient = gradient * derivative.astype(dtype)
        gradient = masked(gradient, weights)
        if "diagonal" in like:
            shape = like["diagonal"].shape
            lead = gradient.ndim - len(shape)
            shared = tuple(d for d in use.features if d < lead or shape[d - lead] == 1)
            gradient = gradient.sum(shared, keepdims=True)
            ones = ones.max(shared, keepdims=True)
            parts = {"diagonal": jnp.square(gradient), "count": ones}
            return {key: sum_to(parts[key], part.shape) for key, part in like.items()}
        parts = {"gradient": gradient, "counts": ones}
        return {
            key: gradients_by_example(site, use, parts[key], examples, part)
            for key, part in like.items()
        }


def gradients_by_example(
    site: Site, use: Use, gradient: ArrayOrShape, examples: Atoms, like: Any
) -> ArrayOrShape:
    """Elementwise gradients summed over the positions of each example.

    Args:
        site: The site of the use.
        use: A scale or bias.
        gradient: Gradient at each position, with the axes of the result.
        examples: The atoms of the example axis.
        like: The slot, ``(parameter..., examples)``.
    """
    shape = like.shape[:-1]
    lead = gradient.ndim - len(shape)
    own = [d for d in range(gradient.ndim) if d >= lead and shape[d - lead] != 1]
    rows = tuple(d for d in range(gradient.ndim) if d not in own)
    side = Rows(gradient, rows, (), tuple((d, ()) for d in own))
    axes = [use.result[d] for d in rows]
    x = by_example(site, side, axes, examples, path=use.view.path).sum(1, dtype=like.dtype)
    return jnp.moveaxis(x.reshape(x.shape[0], *shape), 0, -1)
