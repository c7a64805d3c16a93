"""Embedded real data and batches that are a pure function of a seed and a step."""

from jaxkfac.jobs.data._digits import (
    DIGITS_SHA256,
    Digits,
    epoch_batches,
    load_digits,
    num_batches,
    shift_batch,
)

__all__ = [
    "DIGITS_SHA256",
    "Digits",
    "epoch_batches",
    "load_digits",
    "num_batches",
    "shift_batch",
]
