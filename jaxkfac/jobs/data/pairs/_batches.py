"""Batches of pairs: from data in memory, or read on demand."""

import dataclasses
from collections.abc import Sequence

from jaxkfac.jobs.data.pairs._pairs import (
    Pair,
    PairBatch,
    PairExample,
    check_lengths,
    encode_pair,
    pair_batch,
)
from jaxkfac.jobs.data.readers import FileRows
from jaxkfac.jobs.data.stream import (
    BatchStream,
    NumberedBatches,
    Tally,
    arrange_by_length,
    length_multiples,
)
from jaxkfac.jobs.data.text import TokenizerLike, bucket_lengths

# ---------------- the pairs of a step: a pure function of the seed and the step


@dataclasses.dataclass(frozen=True)
class PairBatches(NumberedBatches[PairExample, PairBatch]):
    """Batches of pairs in a new random order each epoch, without state.

    Attributes:
        examples: The pairs.
        batch_size: Number of rows of a batch.
        source_lengths: Row lengths of sources; each batch uses the shortest that fits.
        lengths: Row lengths of targets, in the same way.
        pad_id: Token for padding.
        start_id: First token of the decoder's inputs.
        seed: Seed of the order.

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

    @property
    def rows(self) -> tuple[PairExample, ...]:
        """The pairs: each is a row."""
        return self.examples

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
        """One pair per row; both sides are padded to one of ``num_lengths`` lengths.

        Raises:
            ValueError: there are fewer pairs than ``batch_size``.
        """
        sources, targets = (
            bucket_lengths([len(example[side]) for example in examples], num_lengths)
            for side in (0, 1)
        )
        return cls(tuple(examples), batch_size, sources, targets, pad_id, start_id, seed)

    def _batch(self, rows: Sequence[PairExample]) -> PairBatch:
        return _padded(rows, self.source_lengths, self.lengths, self.pad_id, self.start_id)

    def _without_loss(self, row: PairExample) -> PairExample:
        return row._replace(target=row.target[:0])


def _padded(
    examples: Sequence[PairExample],
    source_lengths: Sequence[int],
    target_lengths: Sequence[int],
    pad_id: int,
    start_id: int,
) -> PairBatch:
    """A batch of the shortest lengths that fit."""
    longest = (max(map(len, side)) for side in zip(*examples, strict=True))
    source_length, target_length = (
        next(length for length in lengths if length >= most)
        for lengths, most in zip((source_lengths, target_lengths), longest, strict=True)
    )
    return pair_batch(
        examples,
        source_length=source_length,
        target_length=target_length,
        pad_id=pad_id,
        start_id=start_id,
    )


# ---------------- pairs that are read on demand


@dataclasses.dataclass(frozen=True)
class PairStream(BatchStream[PairExample, PairBatch]):
    """Batches of pairs; ``lengths`` are those of targets.

    Attributes:
        source_lengths: Possible row lengths of sources, in ascending order.
    """

    source_lengths: tuple[int, ...] = ()


def pair_stream(
    rows: FileRows[Pair],
    tokenizer: TokenizerLike,
    *,
    batch_size: int,
    max_source_length: int,
    max_target_length: int,
    pad_id: int,
    start_id: int,
    num_lengths: int = 4,
    window: int = 8192,
    seed: int = 0,
) -> PairStream:
    """Batches of pairs, created on demand.

    Args:
        rows: Pairs, from :func:`pair_files`.
        tokenizer: Tokenizer of the model.
        batch_size: Number of rows of a batch.
        max_source_length: Tokens of a source, at least 2; longer ones are cut before the end token.
        max_target_length: Tokens of a target, at least 2; longer ones are cut at the end.
        pad_id: Token for padding.
        start_id: First token of the decoder's inputs.
        num_lengths: Row lengths of sources and of targets are multiples of the longest divided
            by this number: a program is compiled for each pair of lengths.
        window: Number of pairs that are shuffled together.
        seed: Seed of the order.

    Returns:
        Batches from any position; the pairs of a batch have similar lengths.

    Raises:
        ValueError: an option is out of range.
    """
    check_lengths(max_source_length, max_target_length)
    longest = {"max_source_length": max_source_length, "max_target_length": max_target_length}
    source_lengths = length_multiples(max_source_length, num_lengths)
    target_lengths = length_multiples(max_target_length, num_lengths)

    def encode(pair: Pair, tally: Tally) -> list[PairExample]:
        example, *cut = encode_pair(pair, tokenizer, **longest)
        if not len(example.source):
            raise ValueError(f"the source {pair.source[:40]!r} has no tokens")
        tally.longest = max(tally.longest, *map(len, example))
        tally.truncated += any(cut)
        tally.examples += 1
        tally.tokens += len(example.source) + len(example.target)
        tally.learnt += len(example.target)
        return [example]

    def collate(rows_of_batch: Sequence[tuple[PairExample, ...]]) -> PairBatch:
        examples = [example for (example,) in rows_of_batch]
        return _padded(examples, source_lengths, target_lengths, pad_id, start_id)

    return PairStream(
        rows,
        encode,
        arrange_by_length(_length, batch_size=batch_size),
        collate,
        batch_size=batch_size,
        lengths=target_lengths,
        window=window,
        seed=seed,
        source_lengths=source_lengths,
    )


def _length(pair: PairExample) -> int:
    return len(pair.source) + len(pair.target)
