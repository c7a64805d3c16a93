"""Which examples a step sees: a pure function of a seed and an epoch."""

import numpy as np
from jaxtyping import Int


def num_batches(num_examples: int, batch_size: int) -> int:
    """Full batches in one pass over the data; the incomplete last one is left out.

    Raises:
        ValueError: ``batch_size`` is not in ``1 .. num_examples``.
    """
    if not 1 <= batch_size <= num_examples:
        raise ValueError(f"batch_size must lie in 1 .. {num_examples} (examples), not {batch_size}")
    return num_examples // batch_size


def epoch_batches(
    seed: int, epoch: int, *, num_examples: int, batch_size: int
) -> Int[np.ndarray, "batches batch_size"]:
    """Indices of every batch of one epoch, in a fresh random order.

    Nothing is remembered from one call to the next: step ``t`` of a run is row
    ``t % num_batches`` of epoch ``t // num_batches``, so a run resumes from its step
    number alone, and what the last row leaves out differs from epoch to epoch.

    Args:
        seed: Of the run.
        epoch: Counted from 0.
        num_examples: Size of the data set.
        batch_size: Examples per batch.

    Returns:
        ``(num_batches, batch_size)`` int32, no index twice.

    Raises:
        ValueError: ``batch_size`` is not in ``1 .. num_examples``, or ``epoch`` is negative.

    Example:
        >>> epoch_batches(0, 3, num_examples=10, batch_size=4).shape
        (2, 4)
    """
    rows = num_batches(num_examples, batch_size)
    if epoch < 0:
        raise ValueError(f"epoch must not be negative, not {epoch}")
    rng = np.random.Generator(np.random.Philox(key=[seed, epoch]))
    order = rng.permutation(num_examples)[: rows * batch_size]
    return order.reshape(rows, batch_size).astype(np.int32)
