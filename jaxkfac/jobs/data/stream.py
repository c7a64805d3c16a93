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

from jaxkfac.jobs.data._digits import epoch_batches, num_batches
from jaxkfac.jobs.data.readers import Bad, FilePlace, FileRows, data_package

__all__ = [
    "BatchStream",
    "NumberedBatches",
    "Position",
    "Tally",
    "arrange_by_length",
    "end_tokens_text",
    "group_generator",
    "length_multiples",
]

# ---------------- counts of the rows of a data set


_SHOWN, _WORDS = 100, 400  # number of bad rows that are kept, and characters of each


@dataclasses.dataclass
class Tally:
    """Counts of the first pass so far; reading is one window ahead of training.

    Attributes:
        rows: Rows that were read.
        bad: Rows that were skipped because they are not valid records.
        bad_rows: Positions and errors of the first hundred of them.
        examples: Examples from the other rows.
        tokens: Tokens of the examples.
        learnt: Tokens in the loss.
        truncated: Examples that were cut at their end.
        dropped: Examples that were skipped because no token in the loss was left.
        longest: Tokens of the longest example, before it was cut.
        appended: Chats whose template writes no end token: the tokenizer's was appended.
        unlearned: Chats whose template writes one outside its ``{% generation %}`` marks.
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
    appended: int = 0
    unlearned: int = 0

    def leave_out(self, bad: str) -> None:
        """Count a bad row."""
        self.bad += 1
        if len(self.bad_rows) < _SHOWN:
            self.bad_rows.append(bad[:_WORDS])

    def to_plain(self) -> dict[str, Any]:
        """Plain values, as they come back from JSON."""
        return {**vars(self), "bad_rows": list(self.bad_rows)}

    def restore(self, plain: dict[str, Any]) -> None:
        """Restore the counts of :meth:`to_plain`."""
        vars(self).update(plain, bad_rows=list(plain["bad_rows"]))

    def __str__(self) -> str:
        summary = f"{self.rows} rows read, {self.examples} examples, {self.tokens} tokens, "
        summary += f"{self.learnt} of them learnt"
        if self.truncated or self.dropped:
            summary += f"; {self.truncated} cut, {self.dropped} left out (nothing to learn fits)"
        summary += end_tokens_text(self.appended, self.unlearned)
        if self.bad:
            summary += f"; {self.bad} bad rows left out, the first {self.bad_rows[0]}"
        return summary


def end_tokens_text(appended: int, unlearned: int) -> str:
    """What is said of the end tokens of chats, to follow a summary; empty if all is usual.

    Args:
        appended: Chats to which an end token was appended.
        unlearned: Chats whose end token is not in the loss.
    """
    said = ""
    if appended:
        said += (
            f"; the chat template writes no end token behind the last answer of {appended} chats: "
            "the tokenizer's EOS was appended and is learned"
        )
    if unlearned:
        said += (
            f"; the chat template's generation marks leave out the end token of {unlearned} chats: "
            "it is not learned"
        )
    return said


# ---------------- one pass over files as a pipeline of grain, whose state is a place in them
#
# Rows are shuffled as text and encoded after the shuffle, so that filling a window, also when a run
# is resumed, takes only as long as reading.


def make_pass(stream: Any, number: int, tally: Tally) -> Any:
    """An iterator over the batches of a pass; ``get_state`` and ``set_state`` use plain values.

    Args:
        stream: A :class:`~jaxkfac.jobs.data.stream.BatchStream`.
        number: Number of the pass, from 0; each pass has its own order.
        tally: Where to count.
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


# ---------------- streams


_Example = TypeVar("_Example")
_Batch = TypeVar("_Batch")
_Row = TypeVar("_Row")
Position = dict[str, Any]
_GROUP = 16  # number of batches whose examples are sorted or packed together


@dataclasses.dataclass(frozen=True)
class BatchStream(Generic[_Example, _Batch]):
    """Batches of the rows of files, pass after pass; each pass uses each row once.

    A window of rows is read and shuffled. The rows are converted to examples, and groups of
    examples are arranged in rows of batches. Nothing else is kept, so memory does not grow with
    the files. Rows that do not fill a batch are dropped from the pass.

    Attributes:
        rows: Rows of the files.
        encode: ``encode(record, tally)`` returns the examples of a record and counts them.
        arrange: ``arrange(examples, seed)`` returns the examples of each row, in an order that
            depends on the seed; each ``batch_size`` rows form a batch, as far as they go.
        collate: ``collate(rows)`` returns a batch.
        batch_size: Number of rows of a batch.
        lengths: Possible row lengths, in ascending order.
        window: Number of rows that are shuffled together; 1 keeps their order.
        seed: Seed of the order.
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
        """Number of examples that are arranged together."""
        return _GROUP * self.batch_size

    def iterate(self, position: Position | None = None) -> Iterator[tuple[_Batch, Position]]:
        """An endless sequence of batches, each with the position after it.

        Args:
            position: Where to continue, with the same batches as the first time. It consists of
                plain values, and is valid only for the same files and options.

        Raises:
            ModuleNotFoundError: grain, or pyarrow for files that need it, is not installed.
            ValueError: a file is damaged, a whole pass has no batch, or with ``rows.strict`` a row
                is bad.
        """
        data_package("grain")

        number, tally = position["pass"] if position is not None else 0, Tally()
        batches = make_pass(self, number, tally if number == 0 else Tally())
        if position is not None:
            batches.set_state(position["rows"])  # rows that are read again are counted again
            tally.restore(position["tally"])
        has_batches = position is not None
        while True:
            for batch in batches:
                has_batches = True
                yield (
                    batch,
                    {
                        "pass": number,
                        "rows": batches.get_state(),
                        "tally": tally.to_plain(),
                    },
                )
            if not has_batches:
                raise ValueError(self._why_none(tally))
            number += 1
            batches = make_pass(self, number, Tally())

    def first(self) -> _Batch:
        """The first batch."""
        return self._first[0]

    @property
    def first_tally(self) -> Tally:
        """Counts of what was read for the first batch."""
        return Tally(**self._first[1]["tally"])

    @functools.cached_property
    def _first(self) -> tuple[_Batch, Position]:
        return next(self.iterate())

    @functools.cached_property
    def per_epoch(self) -> int:
        """Number of batches in a pass.

        Exact if one window contains all rows. Otherwise it is estimated: the rows of the files are
        counted, and the first window gives the number of rows of a batch per row of a file.
        """
        tally = Tally()
        read = self.rows.read()
        good = [row for _, row in itertools.islice(read, self.window) if not isinstance(row, Bad)]
        examples = [example for record in good for example in self._encoded(record, tally)]
        parts = range(0, len(examples), self.group)
        arranged = [self.arrange(examples[i : i + self.group], (self.seed, 0)) for i in parts]
        num_rows = sum(map(len, arranged))
        if next(read, None) is not None:
            num_rows = num_rows * self.rows.count() // self.window
        return max(num_rows // self.batch_size, 1)

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


# ---------------- batches of data in memory, accessed by number


class NumberedBatches(abc.ABC, Generic[_Row, _Batch]):
    """Batches that are a pure function of their number, with the interface of a stream.

    Each epoch has a new random order, and an incomplete last batch is dropped.

    Attributes:
        rows: What the rows of batches are made of.
        batch_size: Number of rows of a batch.
        seed: Seed of the order.
    """

    rows: tuple[_Row, ...]
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        num_batches(len(self.rows), self.batch_size)

    @abc.abstractmethod
    def _batch(self, rows: Sequence[_Row]) -> _Batch:
        """A batch of these rows."""

    @abc.abstractmethod
    def _without_loss(self, row: _Row) -> _Row:
        """A row that is as long, with nothing in the loss."""

    @property
    def per_epoch(self) -> int:
        """Number of batches in an epoch; an incomplete last one is dropped."""
        return num_batches(len(self.rows), self.batch_size)

    def at(self, step: int) -> _Batch:
        """The batch of a step; steps count from 0 over all epochs."""
        epoch, offset = divmod(step, self.per_epoch)
        order = epoch_batches(
            self.seed, epoch, num_examples=len(self.rows), batch_size=self.batch_size
        )
        return self._batch([self.rows[i] for i in order[offset]])

    def first(self) -> _Batch:
        """The first batch."""
        return self.at(0)

    def iterate(self, position: Position | None = None) -> Iterator[tuple[_Batch, Position]]:
        """An endless sequence of batches, each with the position after it."""
        number = position["batch"] if position is not None else 0
        while True:
            number += 1
            yield self.at(number - 1), {"batch": number}

    def in_order(self, start: int = 0, *, fill: bool = True) -> Iterator[_Batch]:
        """Every row once, in order, for evaluation.

        Args:
            start: Number of the first row.
            fill: Whether the last batch is filled up with its first row, which is then excluded
                from the loss; otherwise it is smaller.
        """
        for first in range(start, len(self.rows), self.batch_size):
            rows = list(self.rows[first : first + self.batch_size])
            missing = self.batch_size - len(rows) if fill else 0
            yield self._batch(rows + [self._without_loss(rows[0])] * missing)


# ---------------- batches of rows with similar lengths


def length_multiples(longest: int, num_lengths: int) -> tuple[int, ...]:
    """At most ``num_lengths`` multiples of a unit, which is itself a multiple of 8.

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
    """An ``arrange`` for rows with one example each, in batches of similar lengths.

    Batches are in a random order; examples that do not fill a batch are last.
    """

    def arrange(examples: list[_Example], seed: tuple[int, int]) -> list[tuple[_Example, ...]]:
        lengths = np.array([length_of(example) for example in examples])
        num_batched = len(lengths) // batch_size * batch_size
        batches = np.argsort(lengths[:num_batched], kind="stable").reshape(-1, batch_size)
        order = group_generator(lengths, seed).permutation(batches).ravel()
        return [(examples[i],) for i in (*order, *range(num_batched, len(lengths)))]

    return arrange


def group_generator(lengths: np.ndarray, seed: tuple[int, int]) -> np.random.Generator:
    """A generator for a group, which depends on its lengths since a group has no number."""
    return np.random.default_rng([*seed, zlib.crc32(lengths.tobytes())])
