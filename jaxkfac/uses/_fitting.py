"""How many gradients of examples fit into a budget of bytes."""

import jax

from jaxkfac.factors import Batch
from jaxkfac.memory import MemoryBudgetError, bytes_text


def fitting(
    batch: Batch, *, each: int, max_bytes: int, name: str, remedy: str, kept: int = 0
) -> int:
    """How many examples of a batch can be taken at once.

    Args:
        batch: The batch.
        each: Bytes of one example's gradients.
        max_bytes: The budget.
        name: What the examples are, for errors.
        remedy: What else to do than to allow more.
        kept: Bytes that stay when all are done.

    Raises:
        MemoryBudgetError: not one.
        ValueError: not all, and an array of the batch does not have the examples first.
    """
    number = batch.num_examples
    if kept + each > max_bytes:
        beside = f", and what is kept of {number} takes {bytes_text(kept)}" if kept else ""
        raise MemoryBudgetError(
            f"max_bytes={max_bytes}: gradients of one example take {bytes_text(each)}{beside}; "
            f"allow that much, or {remedy}"
        )
    some = min(number, (max_bytes - kept) // max(each, 1))
    if some < number and not in_examples(batch):
        raise ValueError(
            f"{name}: gradients of {number} examples do not fit into max_bytes={max_bytes}, and "
            "an array of the batch does not have the examples first: give smaller batches"
        )
    return some


def in_examples(batch: Batch) -> bool:
    """Whether every array of a batch has the examples first, so that it can be cut into them."""
    return all(x.shape[:1] == (batch.num_examples,) for x in jax.tree.leaves(batch))
