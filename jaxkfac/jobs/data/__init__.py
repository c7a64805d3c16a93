"""Embedded real data, and batches that depend only on a seed and a step."""

from jaxkfac.jobs.data._digits import (
    Digits,
    epoch_batches,
    load_digits,
    num_batches,
    shift_batch,
)

__all__ = [
    "Digits",
    "epoch_batches",
    "load_digits",
    "num_batches",
    "shift_batch",
]
