"""Batches of data that do not fit in memory, from any position in the data."""

from jaxkfac.jobs.data.stream._stream import (
    BatchStream,
    NumberedBatches,
    Position,
    Tally,
    arrange_by_length,
    group_generator,
    length_multiples,
)

__all__ = [
    "BatchStream",
    "NumberedBatches",
    "Position",
    "Tally",
    "arrange_by_length",
    "group_generator",
    "length_multiples",
]
