"""One pass over files as a pipeline of grain, whose state is a place in them.

Rows are shuffled as text and become tokens behind the window, so that a window is filled, and
filled again when a run is resumed, in the time of reading.
"""

from typing import Any

import grain
import numpy as np
from grain.experimental import FlatMapIterDataset, FlatMapTransform, WindowShuffleIterDataset

from jaxkfac.data.readers import Bad, FilePlace, FileRows
from jaxkfac.data.stream._tally import Tally


def make_pass(stream: Any, number: int, tally: Tally) -> Any:
    """An iterator over the batches of a pass; ``get_state`` and ``set_state`` are plain values.

    Args:
        stream: A :class:`~jaxkfac.data.stream.BatchStream`.
        number: Of the pass, from 0: its order is another than those of the others.
        tally: To count in.
    """
    seed = np.random.SeedSequence([stream.seed, number])
    order = np.random.default_rng(seed).permutation(len(stream.rows.files)).tolist()
    rows = _Records(stream.rows, order if stream.window > 1 else None, tally)
    if stream.window > 1:
        window_seed = int(seed.generate_state(1)[0] >> 1)  # grain adds the window's number
        rows = WindowShuffleIterDataset(rows, window_size=stream.window, seed=window_seed)
    examples = FlatMapIterDataset(rows, _Encode(stream, tally))
    groups = examples.batch(stream.group, batch_fn=list)
    arranged = FlatMapIterDataset(groups, _Arrange(stream, number))
    batches = arranged.batch(stream.batch_size, drop_remainder=True, batch_fn=stream.collate)
    return iter(batches)


class _Records(grain.IterDataset):
    """``(where, record)`` of good rows; bad ones are counted."""

    def __init__(self, rows: FileRows, order: list[int] | None, tally: Tally) -> None:
        super().__init__()
        self._arguments = rows, order, tally

    def __iter__(self) -> "_RecordIterator":
        return _RecordIterator(*self._arguments)


class _RecordIterator(grain.DatasetIterator):
    def __init__(self, rows: FileRows, order: list[int] | None, tally: Tally) -> None:
        super().__init__()
        self._rows, self._order, self._tally = rows, order, tally
        self.set_state(list(FilePlace()))

    def __next__(self) -> tuple[str, Any]:
        tally = self._tally
        for place, row in self._read:
            self._place = place
            tally.rows += 1
            if not isinstance(row, Bad):
                return self._rows.where(place, self._order), row
            tally.leave_out(str(row))
        raise StopIteration

    def get_state(self) -> list[int]:
        return list(self._place)

    def set_state(self, state: list[int]) -> None:
        self._place = FilePlace(*state)
        self._read = self._rows.read(self._place, self._order)


class _Encode(FlatMapTransform):
    def __init__(self, stream: Any, tally: Tally) -> None:
        self._stream, self._tally = stream, tally

    def flat_map(self, element: tuple[str, Any]) -> Any:
        where, record = element
        try:
            return self._stream.encode(record, self._tally)
        except ValueError as error:
            if self._stream.rows.strict:
                raise ValueError(f"{where}: {error}") from error
            self._tally.leave_out(f"{where}: {error}")
            return []


class _Arrange(FlatMapTransform):
    def __init__(self, stream: Any, number: int) -> None:
        self._stream, self._seed = stream, (stream.seed, number)

    def flat_map(self, element: list[Any]) -> Any:
        return self._stream.arrange(element, self._seed)
