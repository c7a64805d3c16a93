"""The rows of a layer use: data at its input, cotangents at its output, in one form.

A dense product, a convolution and an embedding differ in where their rows and features lie.
Here that difference ends: whoever gathers statistics sees ``Rows`` only.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jaxkfac.factors._patches import over_patches, patches_of, summed_patches
from jaxkfac.factors._rows import Array, Rows
from jaxkfac.interception._rewrite import Site
from jaxkfac.interception._values import Use


def over_input_rows(
    site: Site,
    use: Use,
    operands: Sequence[Any],
    weights: Array | None,
    statistic: Callable[[Rows, Array | None], Any],
) -> Any:
    """A statistic of input rows, summed over the pieces in which the rows are formed.

    Args:
        site: The site of the use.
        use: A dense layer or convolution.
        operands: The equation's operands.
        weights: Which rows exist, with the axes of ``use.rows``.
        statistic: From rows, and which of them exist, to a tree of arrays that is a sum over
            rows. Rows that do not exist are zero.
    """
    if use.kind == "conv":
        return over_patches(site.eqn, use, operands, weights, statistic)
    return statistic(_dense_inputs(site, use, operands).masked(weights), weights)


def summed_input_rows(site: Site, use: Use, operands: Sequence[Any], weights: Array | None) -> Rows:
    """Rows for whoever wants their sums over positions only: those sums may be done already."""
    if use.kind == "conv":
        return summed_patches(site.eqn, use, operands, weights)
    return _dense_inputs(site, use, operands).masked(weights)


def input_rows(site: Site, use: Use, operands: Sequence[Any], weights: Array | None) -> Rows:
    """What a dense layer or a convolution reads; ``weights`` say which rows exist.

    Of a convolution these are all its patches: give it a few examples at a time.
    """
    if use.kind == "conv":
        return patches_of(site.eqn, use, operands).masked(weights)
    return _dense_inputs(site, use, operands).masked(weights)


def output_rows(site: Site, use: Use, cotangent: Array, weights: Array | None) -> Rows:
    """The cotangent of a layer's product; ``weights`` say which rows exist."""
    make = {"dense": _dense_outputs, "conv": _convolution_outputs, "embedding": _embedded}
    return make[use.kind](site, use, cotangent).masked(weights)


def _dense_inputs(site: Site, use: Use, operands: Sequence[Any]) -> Rows:
    contract, shared = site.eqn.params["dimension_numbers"]
    other = 1 - use.operand
    x, features = operands[other], sorted(zip(contract[other], use.in_axes, strict=True))
    taken = {*contract[other], *shared[other]}
    rows = tuple(d for d in range(x.ndim) if d not in taken)
    return Rows(x, rows, tuple(shared[other]), tuple(features))


def _embedded(site: Site, use: Use, cotangent: Array) -> Rows:
    numbers = site.eqn.params["dimension_numbers"]
    rows = tuple(d for d in range(cotangent.ndim) if d not in numbers.offset_dims)
    return Rows(cotangent, rows, (), tuple(zip(numbers.offset_dims, use.out_axes, strict=True)))


def _convolution_outputs(site: Site, use: Use, cotangent: Array) -> Rows:
    examples, channels, *spatial = site.eqn.params["dimension_numbers"].out_spec
    groups, shape = len(use.groups), cotangent.shape
    x = cotangent.reshape(*shape[:channels], *use.groups, -1, *shape[channels + 1 :])
    rows = tuple(d + groups if d > channels else d for d in (examples, *spatial))
    batch = tuple(range(channels, channels + groups))
    return Rows(x, rows, batch, ((channels + groups, use.out_axes[0]),))


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
