"""The rows of a layer use: data at its input, cotangents at its output, in one form.

A dense product, a convolution and an embedding differ in where their rows and features lie.
Here that difference ends: whoever gathers statistics sees ``Rows`` only.
"""

from collections.abc import Sequence
from typing import Any

from jaxkfac.factors._patches import patches_of
from jaxkfac.factors._rows import Array, Rows
from jaxkfac.interception._rewrite import Site
from jaxkfac.interception._values import Use


def input_rows(site: Site, use: Use, operands: Sequence[Any], weights: Array | None) -> Rows:
    """What a dense layer or a convolution reads; ``weights`` say which rows exist."""
    if use.kind == "conv":
        return patches_of(site.eqn, use, operands).masked(weights)
    contract, shared = site.eqn.params["dimension_numbers"]
    other = 1 - use.operand
    x, features = operands[other], sorted(zip(contract[other], use.in_axes, strict=True))
    taken = {*contract[other], *shared[other]}
    rows = tuple(d for d in range(x.ndim) if d not in taken)
    return Rows(x, rows, tuple(shared[other]), tuple(features)).masked(weights)


def output_rows(site: Site, use: Use, cotangent: Array, weights: Array | None) -> Rows:
    """The cotangent of a layer's product; ``weights`` say which rows exist."""
    if use.kind == "dense":
        return _dense_outputs(site, use, cotangent).masked(weights)
    numbers = site.eqn.params["dimension_numbers"]
    if use.kind == "conv":
        rows = (numbers.out_spec[0], *numbers.out_spec[2:])
        features = ((numbers.out_spec[1], use.out_axes[0]),)
    else:
        rows = tuple(d for d in range(cotangent.ndim) if d not in numbers.offset_dims)
        features = tuple(zip(numbers.offset_dims, use.out_axes, strict=True))
    return Rows(cotangent, rows, (), features).masked(weights)


def _dense_outputs(site: Site, use: Use, cotangent: Array) -> Rows:
    _, shared = site.eqn.params["dimension_numbers"]
    num_batch, num_free, num_rows = len(shared[0]), len(use.out_axes), len(use.rows)
    first_free = num_batch + (num_rows if use.operand == 1 else 0)
    first_row = num_batch + (0 if use.operand == 1 else num_free)
    free = [(first_free + i, axis) for i, axis in enumerate(use.out_axes)]
    batch = list(range(num_batch))
    if use.free_stack:
        batch.append(free.pop(0)[0])
    rows = tuple(range(first_row, first_row + num_rows))
    return Rows(cotangent, rows, tuple(batch), tuple(free))
