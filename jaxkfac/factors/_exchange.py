"""What devices that share a batch add up of the factors."""

import math
from typing import Any

import jax

from jaxkfac.factors._statistics import Statistics
from jaxkfac.interception import Layer
from jaxkfac.linalg import PANELS_FROM, panel_shapes

_OWN = ("count", "counts", "a_count", "a_numbers")  # numbers of rows, which shapes say


def exchanged_bytes(statistics: Statistics) -> int:
    """Bytes of the sums that devices add up in one backward pass, each with some of the examples.

    Statistics are added where a product over rows gives them: whole, or the panels of one
    triangle. Numbers of rows, one for each layer where there is a mask, are not among them.
    """
    return sum(_of_layer(statistics, layer) for layer in statistics.layers)


def _of_layer(statistics: Statistics, layer: Layer) -> int:
    slot: dict[str, Any] = jax.eval_shape(lambda: statistics.slot(layer))
    total = 0
    for key, entry in slot.items():
        itemsize = max(x.dtype.itemsize for x in jax.tree.leaves(entry))
        if key in ("a_rows", "g_rows"):  # products are formed after the pass
            total += itemsize * _elements(layer, entry.shape[-1])
        elif key == "g" and statistics.unpacks(layer):
            total += itemsize * _elements(layer, layer.out_features)
        elif key == "gradient":
            total += itemsize * entry.size // entry.shape[-1]
        elif key not in (*_OWN, "constants"):
            total += sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(entry))
    return total


def _elements(layer: Layer, size: int) -> int:
    """Of a stack of matrices: of the upper triangle's panels, where they are wide."""
    panels = panel_shapes(size) if size >= PANELS_FROM else [(size, size)]
    return math.prod(layer.stack) * sum(rows * columns for rows, columns in panels)
