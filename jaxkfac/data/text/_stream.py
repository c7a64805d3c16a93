"""Tokens of records that are read as they are needed."""

import functools
from collections.abc import Sequence
from typing import Literal

import numpy as np

from jaxkfac._errors import one_of
from jaxkfac.data.readers import FileRows
from jaxkfac.data.stream import (
    BatchStream,
    Tally,
    arrange_by_length,
    group_generator,
    length_multiples,
)
from jaxkfac.data.text._encode import Example, LossOn, check_encoding, encode_record, truncate
from jaxkfac.data.text._records import Record
from jaxkfac.data.text._rows import TokenBatch, pack, token_batch
from jaxkfac.data.text._tokenizer import TokenizerLike

Batching = Literal["pad", "pack"]


def token_stream(
    rows: FileRows,
    tokenizer: TokenizerLike,
    *,
    batch_size: int,
    max_length: int,
    batching: Batching = "pad",
    num_lengths: int = 8,
    loss_on: LossOn = "assistant",
    window: int = 8192,
    seed: int = 0,
) -> BatchStream[Example, TokenBatch]:
    """Batches of tokens, made as they are asked for.

    Args:
        rows: Records, as :func:`record_files` finds them.
        tokenizer: Of the model.
        batch_size: Rows of a batch.
        max_length: Tokens of a record, at least 2; the end of a longer one is cut.
        batching: ``"pad"``: an example in each row, those of a batch of about one length, padded
            to the longest of the batch; ``"pack"``: rows of ``max_length`` tokens with as many
            examples as fit.
        num_lengths: With ``"pad"``: a batch's length is a multiple of ``max_length`` over this,
            so that no more programs than these are compiled.
        loss_on: ``"all"``: prompts are learnt too.
        window: Records among which the order is random.
        seed: Of the order.

    Returns:
        Batches from any position.

    Raises:
        ValueError: an option out of range.
    """
    check_encoding(max_length, loss_on)
    one_of("batching", batching, ("pad", "pack"))
    lengths = length_multiples(max_length, num_lengths)
    arrange = arrange_by_length(_length, batch_size=batch_size)
    if batching == "pack":
        lengths = (max_length,)
        arrange = functools.partial(_packed, length=max_length)

    def encode(record: Record, tally: Tally) -> list[Example]:
        found = encode_record(record, tokenizer, loss_on=loss_on)
        return [x for example in found if (x := _counted(example, max_length, tally))]

    def collate(held: Sequence[tuple[Example, ...]]) -> TokenBatch:
        longest = max(sum(len(example.ids) - 1 for example in row) for row in held)
        length = next(n for n in lengths if n >= longest)
        return token_batch(held, length=length, pad_id=tokenizer.pad_id)

    return BatchStream(
        rows,
        encode,
        arrange,
        collate,
        batch_size=batch_size,
        lengths=lengths,
        window=window,
        seed=seed,
    )


def _counted(example: Example, max_length: int, tally: Tally) -> Example | None:
    """The example, cut; ``None`` if nothing to learn is left of it."""
    tally.longest = max(tally.longest, len(example.ids))
    tally.truncated += len(example.ids) > max_length
    example = truncate(example, max_length)
    if not example.learnt.any():
        tally.dropped += 1
        return None
    tally.examples += 1
    tally.tokens += len(example.ids)
    tally.learnt += int(example.learnt.sum())
    return example


def _packed(
    examples: list[Example], seed: tuple[int, int], *, length: int
) -> list[tuple[Example, ...]]:
    """Rows with as many examples as fit, in a random order."""
    lengths = np.array([_length(example) for example in examples])
    rows = pack((lengths - 1).tolist(), length)
    order = group_generator(lengths, seed).permutation(len(rows))
    return [tuple(examples[i] for i in rows[row]) for row in order]


def _length(example: Example) -> int:
    return len(example.ids)
