"""Pairs that are read as they are needed."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxkfac.data.pairs._encode import PairExample, check_lengths, encode_pair
from jaxkfac.data.pairs._pairs import Pair
from jaxkfac.data.pairs._rows import PairBatch, pair_batch
from jaxkfac.data.readers import FileRows
from jaxkfac.data.stream import BatchStream, Tally, arrange_by_length, length_multiples
from jaxkfac.data.text import TokenizerLike


@dataclasses.dataclass(frozen=True)
class PairStream(BatchStream[PairExample, PairBatch]):
    """Batches of pairs; ``lengths`` are those of targets.

    Attributes:
        source_lengths: Row lengths of sources that occur, ascending.
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
    """Batches of pairs, made as they are asked for.

    Args:
        rows: Pairs, as :func:`pair_files` finds them.
        tokenizer: Of the model.
        batch_size: Rows of a batch.
        max_source_length: Tokens of a source, at least 2; a longer one is cut before its end.
        max_target_length: Tokens of a target, at least 2; a longer one loses its end.
        pad_id: What fills the rest of a row.
        start_id: What the decoder reads first.
        num_lengths: A batch's row lengths, of sources and of targets, are multiples of the
            longest over this: a program is compiled for each pair of them that occurs.
        window: Pairs among which the order is random.
        seed: Of the order.

    Returns:
        Batches from any position, each of pairs of about one length.

    Raises:
        ValueError: an option out of range.
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

    def collate(held: Sequence[tuple[PairExample, ...]]) -> PairBatch:
        examples = [example for (example,) in held]
        return pair_batch(
            examples,
            source_length=_shortest(source_lengths, [e.source for e in examples]),
            target_length=_shortest(target_lengths, [e.target for e in examples]),
            pad_id=pad_id,
            start_id=start_id,
        )

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


def _shortest(lengths: Sequence[int], sides: Sequence[np.ndarray]) -> int:
    longest = max(map(len, sides))
    return next(length for length in lengths if length >= longest)


def _length(pair: PairExample) -> int:
    return len(pair.source) + len(pair.target)
