"""Which pairs a step reads: a pure function of the seed and the step."""

import dataclasses
from collections.abc import Iterator, Sequence

from jaxkfac.data._batches import epoch_batches, num_batches
from jaxkfac.data.pairs._encode import PairExample
from jaxkfac.data.pairs._rows import PairBatch, pair_batch
from jaxkfac.data.stream import NumberedBatches
from jaxkfac.data.text import bucket_lengths


@dataclasses.dataclass(frozen=True)
class PairBatches(NumberedBatches[PairBatch]):
    """Batches of pairs in a fresh random order each epoch; nothing is remembered.

    Attributes:
        examples: The pairs.
        batch_size: Rows of a batch.
        source_lengths: Row lengths of sources; a batch takes the shortest that fits its rows.
        lengths: Row lengths of targets, likewise.
        pad_id: What fills the rest.
        start_id: What the decoder reads first.
        seed: Of the order.

    Example:
        >>> import numpy as np
        >>> examples = [PairExample(np.arange(4), np.arange(9))] * 6
        >>> batches = PairBatches.padded(examples, batch_size=2, pad_id=0, start_id=0)
        >>> batches.per_epoch, batches.at(100).source.shape, batches.at(100).targets.shape
        (3, (2, 8), (2, 16))
    """

    examples: tuple[PairExample, ...]
    batch_size: int
    source_lengths: tuple[int, ...]
    lengths: tuple[int, ...]
    pad_id: int
    start_id: int
    seed: int = 0

    def __post_init__(self) -> None:
        num_batches(len(self.examples), self.batch_size)

    @classmethod
    def padded(
        cls,
        examples: Sequence[PairExample],
        *,
        batch_size: int,
        pad_id: int,
        start_id: int,
        seed: int = 0,
        num_lengths: int = 1,
    ) -> "PairBatches":
        """A pair in each row, either side padded to one of ``num_lengths`` lengths.

        Raises:
            ValueError: there are fewer pairs than ``batch_size``.
        """
        sources, targets = (
            bucket_lengths([len(example[side]) for example in examples], num_lengths)
            for side in (0, 1)
        )
        return cls(tuple(examples), batch_size, sources, targets, pad_id, start_id, seed)

    @property
    def per_epoch(self) -> int:
        """Batches of an epoch; the incomplete last one is left out."""
        return num_batches(len(self.examples), self.batch_size)

    def at(self, step: int) -> PairBatch:
        """The batch of a step, counted from 0 over all epochs."""
        epoch, offset = divmod(step, self.per_epoch)
        order = epoch_batches(
            self.seed, epoch, num_examples=len(self.examples), batch_size=self.batch_size
        )
        return self._batch([self.examples[i] for i in order[offset]])

    def in_order(self) -> Iterator[PairBatch]:
        """Every pair once, in order, as an evaluation reads them.

        The last batch is filled with its first pair, of which nothing is learnt.
        """
        for start in range(0, len(self.examples), self.batch_size):
            rows = list(self.examples[start : start + self.batch_size])
            filler = rows[0]._replace(target=rows[0].target[:0])
            yield self._batch(rows + [filler] * (self.batch_size - len(rows)))

    def _batch(self, examples: Sequence[PairExample]) -> PairBatch:
        def shortest(lengths: Sequence[int], side: int) -> int:
            longest = max(len(example[side]) for example in examples)
            return next(length for length in lengths if length >= longest)

        return pair_batch(
            examples,
            source_length=shortest(self.source_lengths, 0),
            target_length=shortest(self.lengths, 1),
            pad_id=self.pad_id,
            start_id=self.start_id,
        )
