"""Which rows a step reads: a pure function of the seed and the step."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from jaxkfac.data._batches import epoch_batches, num_batches
from jaxkfac.data.stream import NumberedBatches
from jaxkfac.data.text._encode import Example
from jaxkfac.data.text._rows import TokenBatch, bucket_lengths, pack, token_batch


@dataclasses.dataclass(frozen=True)
class TokenBatches(NumberedBatches[TokenBatch]):
    """Batches of a data set in a fresh random order each epoch; nothing is remembered.

    Attributes:
        rows: The examples of each row.
        batch_size: Rows of a batch.
        lengths: Row lengths that occur; a batch takes the shortest that fits its rows.
        pad_id: What fills the rest.
        seed: Of the order.

    Example:
        >>> examples = [Example(np.arange(4), np.ones(4, bool))] * 6
        >>> batches = TokenBatches.padded(examples, batch_size=2, pad_id=0)
        >>> batches.per_epoch, batches.lengths, batches.at(100).ids.shape
        (3, (8,), (2, 8))
    """

    rows: tuple[tuple[Example, ...], ...]
    batch_size: int
    lengths: tuple[int, ...]
    pad_id: int
    seed: int = 0

    def __post_init__(self) -> None:
        num_batches(len(self.rows), self.batch_size)

    @classmethod
    def padded(
        cls,
        examples: Sequence[Example],
        *,
        batch_size: int,
        pad_id: int,
        seed: int = 0,
        num_lengths: int = 1,
    ) -> "TokenBatches":
        """An example in each row, padded to one of ``num_lengths`` lengths.

        Raises:
            ValueError: there are fewer examples than ``batch_size``.
        """
        rows = tuple((example,) for example in examples)
        lengths = bucket_lengths([_taken(row) for row in rows], num_lengths)
        return cls(rows, batch_size, lengths, pad_id, seed)

    @classmethod
    def packed(
        cls,
        examples: Sequence[Example],
        *,
        batch_size: int,
        length: int,
        pad_id: int,
        seed: int = 0,
    ) -> "TokenBatches":
        """Rows of ``length`` tokens with as many examples as fit.

        Rows are filled once and come in another order each epoch, so that a step's rows
        follow from its number alone.

        Raises:
            ValueError: there are fewer rows than ``batch_size``, or an example does not fit.
        """
        found = pack([len(e.ids) - 1 for e in examples], length)
        rows = tuple(tuple(examples[i] for i in row) for row in found)
        return cls(rows, batch_size, (length,), pad_id, seed)

    @property
    def examples(self) -> tuple[Example, ...]:
        """Every example, row by row."""
        return tuple(example for row in self.rows for example in row)

    @property
    def per_epoch(self) -> int:
        """Batches of an epoch; the incomplete last one is left out."""
        return num_batches(len(self.rows), self.batch_size)

    def at(self, step: int) -> TokenBatch:
        """The batch of a step, counted from 0 over all epochs."""
        epoch, offset = divmod(step, self.per_epoch)
        order = epoch_batches(
            self.seed, epoch, num_examples=len(self.rows), batch_size=self.batch_size
        )
        return self._batch([self.rows[i] for i in order[offset]])

    def in_order(self) -> Iterator[TokenBatch]:
        """Every row once, in order, as an evaluation reads them.

        The last batch is filled with its first row, of which nothing is learnt.
        """
        for start in range(0, len(self.rows), self.batch_size):
            rows = list(self.rows[start : start + self.batch_size])
            filler = tuple(e._replace(learnt=np.zeros_like(e.learnt)) for e in rows[0])
            yield self._batch(rows + [filler] * (self.batch_size - len(rows)))

    def _batch(self, rows: Sequence[Sequence[Example]]) -> TokenBatch:
        longest = max(_taken(row) for row in rows)
        length = next(n for n in self.lengths if n >= longest)
        return token_batch(rows, length=length, pad_id=self.pad_id)


def _taken(row: Sequence[Example]) -> int:
    return sum(len(example.ids) - 1 for example in row)
