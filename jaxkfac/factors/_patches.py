"""The input rows of a convolution."""

from collections.abc import Sequence
from typing import Any

import jax

from jaxkfac.factors._rows import Rows
from jaxkfac.interception._values import Use


def patches_of(eqn: Any, use: Use, operands: Sequence[Any]) -> Rows:
    """Every patch as a row: ``(examples, positions..., kernel positions..., channels)``."""
    p, x = eqn.params, operands[0]
    numbers = p["dimension_numbers"]
    kernel = operands[1].shape
    patches = jax.lax.conv_general_dilated_patches(
        x,
        [kernel[d] for d in numbers.rhs_spec[2:]],
        p["window_strides"],
        p["padding"],
        lhs_dilation=p["lhs_dilation"],
        rhs_dilation=p["rhs_dilation"],
        dimension_numbers=numbers,
        precision=jax.lax.Precision.HIGHEST,
    )
    order = (numbers.out_spec[0], *numbers.out_spec[2:], numbers.out_spec[1])
    patches = patches.transpose(order)
    patches = patches.reshape(*patches.shape[:-1], *[kernel[d] for d in numbers.rhs_spec[1:]])
    rows = tuple(range(len(order) - 1))
    return Rows(patches, rows, (), tuple(enumerate(use.in_axes, start=len(order) - 1)))
