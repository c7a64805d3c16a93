"""Batches of data that do not fit in memory."""

import abc
import dataclasses
import functools
import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import grain
import numpy as np
from grain.experimental import FlatMapIterDataset, FlatMapTransform, WindowShuffleIterDataset

from jaxkfac.jobs.data.readers import Bad, FilePlace, FileRows, data_package

# ---------------- what became of the rows of a data set


_SHOWN, _WORDS = 100, 400  # bad rows whose numbers are kept, and characters of each


@dataclasses.dataclass
class Tally:
    """Counts of the first pass so far; reading is a window ahead of training.

    Attributes:
        rows: Read.
        bad: Left out, because they are no records.
        bad_rows: Where the first hundred of them are, and what is wrong.
        examples: Made of the others.
        tokens: In them.
        learnt: Of the tokens, in the loss.
        truncated: Examples that lost their end.
        dropped: Examples left out, because nothing to learn was left of them.
        longest: Tokens of the longest, before it was cut.
    """

    rows: int = 0
    bad: int = 0
    bad_rows: list[str] = dataclasses.field(default_factory=list)
    examples: int = 0
    tokens: int = 0
    learnt: int = 0
    truncated: int = 0
    dropped: int = 0
    longest: int = 0

    def leave_out(self, bad: str) -> None:
        """Count a bad row."""
        self.bad += 1
        if len(self.bad_rows) < _SHOWN:
            self.bad_rows.append(bad[:_WORDS])

    def to_plain(self) -> dict[str, Any]:
        """As it comes back from JSON."""
        return {**vars(self), "bad_rows": list(self.bad_rows)}

    def restore(self, plain: dict[str, Any]) -> None:
        """Count on from :meth:`to_plain`."""
        vars(self).update(plain, bad_rows=list(plain["bad_rows"]))

    def __str__(self) -> str:
        words = f"{self.rows} rows read, {self.examples} examples, {self.tokens} tokens, "
        words += f"{self.learnt} of them learnt"
        if self.truncated or self.dropped:
            words += f"; {self.truncated} cut, {self.dropped} left out (nothing to learn fits)"
        if self.bad:
            words += f"; {self.bad} bad rows left out, the first {self.bad_rows[0]}"
        return words


# ---------------- one pass over files as a pipeline of grain, whose state is a place in them
#
# Rows are shuffled as text and become tokens behind the window, so that a window is filled, and
# filled again when a run is resumed, in the time of reading.


def make_pass(stream: Any, number: int, tally: Tally) -> Any:
    """An iterator over the batches of a pass; ``get_state`` and ``set_state`` are plain values.

    Args:
        stream: A :class:`~jaxkfac.jobs.data.stream.BatchStream`.
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


# ----------------


_Example = TypeVar("_Example")
_Batch = TypeVar("_Batch")
Position = dict[str, Any]
_GROUP = 16  # batches whose examples are sorted, or packed, together


@dataclasses.dataclass(frozen=True)
class BatchStream(Generic[_Example, _Batch]):
    """Batches of the rows of files, pass after pass, each row once in a pass.

    A window of rows is read and shuffled; they are made into examples, a group of these into
    rows of batches. Nothing else is kept, so memory does not grow with the files. Rows that fill
    no batch are left out of their pass.

    Attributes:
        rows: Of the files.
        encode: ``encode(record, tally)``: the examples of a record, counted.
        arrange: ``arrange(examples, seed)``: what the rows of batches hold, in an order by the
            seed; of ``batch_size`` rows at a time, as far as they go.
        collate: ``collate(rows)``: a batch.
        batch_size: Rows of a batch.
        lengths: Row lengths that occur, ascending.
        window: Rows of files among which the order is random; 1 keeps theirs.
        seed: Of the order.
    """

    rows: FileRows
    encode: Callable[[Any, Tally], Sequence[_Example]]
    arrange: Callable[[list[_Example], tuple[int, int]], list[tuple[_Example, ...]]]
    collate: Callable[[Sequence[tuple[_Example, ...]]], _Batch]
    batch_size: int
    lengths: tuple[int, ...]
    window: int = 8192
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch_size", "window"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")

    @property
    def group(self) -> int:
        """Examples that are arranged at one time."""
        return _GROUP * self.batch_size

    def iterate(self, position: Position | None = None) -> Iterator[tuple[_Batch, Position]]:
        """Batches without end, each with the position behind it.

        Args:
            position: Where to go on: the same batches follow as the first time. It is of plain
                values, and of these files and options alone.

        Raises:
            ModuleNotFoundError: grain, or pyarrow for files that need it, is not installed.
            ValueError: a damaged file, no batch in a whole pass, or with ``rows.strict`` a bad
                row.
        """
        data_package("grain")

        number, tally = position["pass"] if position is not None else 0, Tally()
        batches = make_pass(self, number, tally if number == 0 else Tally())
        if position is not None:
            batches.set_state(position["rows"])  # counts again what it reads again
            tally.restore(position["tally"])
        found = position is not None
        while True:
            for batch in batches:
                found = True
                yield (
                    batch,
                    {
                        "pass": number,
                        "rows": batches.get_state(),
                        "tally": tally.to_plain(),
                    },
                )
            if not found:
                raise ValueError(self._why_none(tally))
            number += 1
            batches = make_pass(self, number, Tally())

    def first(self) -> _Batch:
        """The first batch."""
        return self._first

    @functools.cached_property
    def _first(self) -> _Batch:
        return next(self.iterate())[0]

    @functools.cached_property
    def per_epoch(self) -> int:
        """Batches of a pass.

        Exact where one window holds all rows. Of more, the rows of the files are counted, and the
        first window says how many rows of a batch they make.
        """
        tally = Tally()
        read = self.rows.read()
        good = [row for _, row in itertools.islice(read, self.window) if not isinstance(row, Bad)]
        examples = [example for record in good for example in self._encoded(record, tally)]
        parts = range(0, len(examples), self.group)
        arranged = [self.arrange(examples[i : i + self.group], (self.seed, 0)) for i in parts]
        made = sum(map(len, arranged))
        if next(read, None) is not None:
            made = made * self.rows.count() // self.window
        return max(made // self.batch_size, 1)

    def _encoded(self, record: Any, tally: Tally) -> Sequence[_Example]:
        try:
            return self.encode(record, tally)
        except ValueError:
            if self.rows.strict:
                raise
            return []

    def _why_none(self, tally: Tally) -> str:
        if not tally.rows:
            files = ", ".join(map(str, self.rows.files))
            return f"{files} holds no row"
        if tally.bad == tally.rows:
            return f"none of {tally.rows} rows is a record; {tally.bad_rows[0]}"
        if not tally.examples:
            return (
                f"none of {tally.rows - tally.bad} records has anything to learn in its first "
                f"max_length tokens (the longest has {tally.longest}): raise max_length"
            )
        return (
            f"batch_size must lie in 1 .. {tally.examples} (examples), or fewer where several "
            f"share a row, not {self.batch_size}"
        )


# ---------------- batches of data in memory, each known by its number


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


# ---------------- batches of rows of about one length


def length_multiples(longest: int, num_lengths: int) -> tuple[int, ...]:
    """At most ``num_lengths``, multiples of one that is a multiple of 8 where it can be.

    Raises:
        ValueError: ``num_lengths`` is not positive.
    """
    if num_lengths < 1:
        raise ValueError(f"num_lengths must be at least 1, not {num_lengths}")
    unit = -(-longest // num_lengths)
    unit = -(-unit // 8) * 8
    return tuple(range(unit, longest + unit, unit))


def arrange_by_length(
    length_of: Callable[[_Example], int], *, batch_size: int
) -> Callable[[list[_Example], tuple[int, int]], list[tuple[_Example, ...]]]:
    """An ``arrange`` for a stream whose rows hold one example each: batches of about one length.

    They come in a random order; examples that fill no batch are last.
    """

    def arrange(examples: list[_Example], seed: tuple[int, int]) -> list[tuple[_Example, ...]]:
        lengths = np.array([length_of(example) for example in examples])
        whole = len(lengths) // batch_size * batch_size
        batches = np.argsort(lengths[:whole], kind="stable").reshape(-1, batch_size)
        order = group_generator(lengths, seed).permutation(batches).ravel()
        return [(examples[i],) for i in (*order, *range(whole, len(lengths)))]

    return arrange


def group_generator(lengths: np.ndarray, seed: tuple[int, int]) -> np.random.Generator:
    """Another one for each group, although a group does not know its number."""
    return np.random.default_rng([*seed, zlib.crc32(lengths.tobytes())])
