"""What devices that share a batch add up of the factors."""

import math
from typing import Any

import jax

from jaxkfac.factors._statistics import Statistics
from jaxkfac.interception import Layer
from jaxkfac.linalg import has_panels, panel_shapes

_OWN = ("count", "counts", "a_count", "a_numbers")  # numbers of rows, which shapes say


def exchanged_bytes(statistics: Statistics, platform: str) -> int:
    """Bytes of the sums that devices add up in one backward pass, each with some of the examples.

    Statistics are added where a product over rows gives them: whole, or the panels of one
    triangle. Numbers of rows, one for each layer where there is a mask, are not among them.

    Args:
        statistics: Of the layers.
        platform: Whose products of rows are meant.
    """
    return sum(_of_layer(statistics, layer, platform) for layer in statistics.layers)


def _of_layer(statistics: Statistics, layer: Layer, platform: str) -> int:
    slot: dict[str, Any] = jax.eval_shape(lambda: statistics.slot(layer))
    total = 0
    for key, entry in slot.items():
        itemsize = max(x.dtype.itemsize for x in jax.tree.leaves(entry))
        formed = key in ("a_rows", "g_rows")  # products are formed after the pass
        if formed or isinstance(entry, tuple) or (key == "g" and statistics.unpacks(layer)):
            size = jax.tree.leaves(entry)[0].shape[-1]  # of the first panel, which is as wide
            total += itemsize * _elements(layer, size, platform)
        elif key == "gradient":
            total += itemsize * entry.size // entry.shape[-1]
        elif key not in (*_OWN, "constants"):
            total += itemsize * entry.size
    return total


def _elements(layer: Layer, size: int, platform: str) -> int:
    """Of a stack of matrices, or of one: of its triangle's panels, where it is wide."""
    if layer.stack or not has_panels(size, platform):
        return math.prod(layer.stack) * size**2
    return sum(rows * columns for rows, columns in panel_shapes(size))
