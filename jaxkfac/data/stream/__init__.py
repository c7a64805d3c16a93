"""Batches of data that do not fit in memory, from any position in them."""

from jaxkfac.data.stream._lengths import group_generator, length_multiples, order_by_length
from jaxkfac.data.stream._numbered import NumberedBatches
from jaxkfac.data.stream._stream import BatchStream, Position
from jaxkfac.data.stream._tally import Tally

__all__ = [
    "BatchStream",
    "NumberedBatches",
    "Position",
    "Tally",
    "group_generator",
    "length_multiples",
    "order_by_length",
]
