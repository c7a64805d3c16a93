"""Batches of data in memory, each known by its number."""

import abc
from collections.abc import Iterator
from typing import Generic, TypeVar

from jaxkfac.data.stream._stream import Position

_Batch = TypeVar("_Batch")


class NumberedBatches(abc.ABC, Generic[_Batch]):
    """Batches that are a pure function of their number, read as a stream is."""

    @abc.abstractmethod
    def at(self, step: int) -> _Batch:
        """The batch of a step, counted from 0 over all epochs."""

    def first(self) -> _Batch:
        """The first batch."""
        return self.at(0)

    def iterate(self, position: Position | None = None) -> Iterator[tuple[_Batch, Position]]:
        """Batches without end, each with the position behind it, from which to go on."""
        number = position["batch"] if position is not None else 0
        while True:
            number += 1
            yield self.at(number - 1), {"batch": number}
