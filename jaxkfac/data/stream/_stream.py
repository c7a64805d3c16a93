"""Batches of data that do not fit in memory."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from jaxkfac.data.readers import Bad, FileRows, data_package
from jaxkfac.data.stream._tally import Tally

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
        from jaxkfac.data.stream._pipeline import make_pass

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
