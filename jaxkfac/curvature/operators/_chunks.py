"""Chunks of a batch that are refused."""

from typing import Any

import jax

PyTree = Any


def check_chunk(chunk: int | None, examples: PyTree) -> None:
    """Refuse a chunk below one, and arrays that do not have the examples first.

    Raises:
        ValueError: naming the shape that does not fit.
    """
    if chunk is None:
        return
    if chunk < 1:
        raise ValueError(f"chunk={chunk}: expected a number of examples, at least 1, or None")
    leaves = jax.tree.leaves(examples)
    number = leaves[0].shape[0]
    for leaf in leaves:
        if leaf.shape[:1] != (number,):
            raise ValueError(
                f"chunk={chunk} cuts the batch along its first axis, of {number} examples, and "
                f"an array of it has shape {leaf.shape}; pass chunk=None"
            )
