"""Batches of data that do not fit in memory, from any position in them."""

from jaxkfac.data.stream._lengths import arrange_by_length, group_generator, length_multiples
from jaxkfac.data.stream._numbered import NumberedBatches
from jaxkfac.data.stream._stream import BatchStream, Position
from jaxkfac.data.stream._tally import Tally

__all__ = [
    "BatchStream",
    "NumberedBatches",
    "Position",
    "Tally",
    "arrange_by_length",
    "group_generator",
    "length_multiples",
]
