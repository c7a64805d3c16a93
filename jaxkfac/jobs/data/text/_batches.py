"""Batches of records: from data in memory, or read on demand."""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from jaxkfac._errors import one_of
from jaxkfac.jobs.data.readers import FileRows, find_files, read_rows, read_splits
from jaxkfac.jobs.data.stream import (
    BatchStream,
    NumberedBatches,
    Tally,
    arrange_by_length,
    group_generator,
    length_multiples,
)
from jaxkfac.jobs.data.text._encode import (
    Example,
    LossOn,
    Record,
    TokenizerLike,
    check_encoding,
    encode_counted,
)
from jaxkfac.jobs.data.text._formats import parse_record
from jaxkfac.jobs.data.text._rows import TokenBatch, bucket_lengths, pack, token_batch

# ---------------- the rows of a step: a pure function of the seed and the step


@dataclasses.dataclass(frozen=True)
class TokenBatches(NumberedBatches[tuple[Example, ...], TokenBatch]):
    """Batches of a data set in a new random order each epoch, without state.

    Attributes:
        rows: The examples of each row.
        batch_size: Number of rows of a batch.
        lengths: Possible row lengths; each batch uses the shortest that fits.
        pad_id: Token for padding.
        seed: Seed of the order.

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
        """One example per row, padded to one of ``num_lengths`` lengths.

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
        """Rows of ``length`` tokens, each with as many examples as fit.

        Rows are packed once and shuffled each epoch, so that the rows of a step depend only on
        its number.

        Raises:
            ValueError: there are fewer rows than ``batch_size``, or an example does not fit.
        """
        packed_rows = pack([len(e.ids) - 1 for e in examples], length)
        rows = tuple(tuple(examples[i] for i in row) for row in packed_rows)
        return cls(rows, batch_size, (length,), pad_id, seed)

    @property
    def examples(self) -> tuple[Example, ...]:
        """All examples, row by row."""
        return tuple(example for row in self.rows for example in row)

    def _batch(self, rows: Sequence[tuple[Example, ...]]) -> TokenBatch:
        return _padded(rows, self.lengths, self.pad_id)

    def _without_loss(self, row: tuple[Example, ...]) -> tuple[Example, ...]:
        return tuple(example._replace(learnt=np.zeros_like(example.learnt)) for example in row)


def _padded(rows: Sequence[tuple[Example, ...]], lengths: Sequence[int], pad_id: int) -> TokenBatch:
    """A batch of the shortest length that fits."""
    longest = max(map(_taken, rows))
    return token_batch(rows, length=next(n for n in lengths if n >= longest), pad_id=pad_id)


def _taken(row: Sequence[Example]) -> int:
    return sum(len(example.ids) - 1 for example in row)


# ---------------- records from files


def read_records(path: Path | str) -> list[Record]:
    """Read the records of a file, in order.

    Args:
        path: A file with rows as accepted by :func:`parse_record`, in a format of
            :mod:`jaxkfac.jobs.data.readers`. Empty lines are ignored.

    Returns:
        At least one record.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a row is not JSON, not UTF-8 or not a record (names file and row number),
            there is no record, or the file is damaged or has an unknown format.

    Example:
        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "train.jsonl")
        ...     _ = path.write_text('{"text": "Fe is iron"}')
        ...     read_records(path)
        [Completion(prompt='', completion='Fe is iron')]
    """
    return read_rows(path, parse_record)


def record_files(path: Path | str, *, strict: bool = False) -> tuple[FileRows, FileRows | None]:
    """Records for training and for validation, to be read on demand.

    Args:
        path: A file or a folder, whose files are assigned by
            :func:`jaxkfac.jobs.data.readers.find_files`.
        strict: Whether a bad row raises an error.

    Returns:
        ``(train, validation)``; the second may be ``None``.

    Raises:
        FileNotFoundError: there is no such path, or no training data in it.
        ValueError: a file has an unknown format.
    """
    train, validation = find_files(path)
    validation_rows = FileRows(validation, parse_record, strict) if validation else None
    return FileRows(train, parse_record, strict), validation_rows


def read_folder(path: Path | str) -> tuple[list[Record], list[Record]]:
    """Read all records for training and for validation.

    Args:
        path: See :func:`record_files`.

    Returns:
        ``(train, validation)``; the second may be empty.

    Raises:
        FileNotFoundError: there is no such path, or no training data in it; lists the contents
            of the folder.
        ValueError: see :func:`read_records`.
    """
    return read_splits(path, parse_record)


# ---------------- tokens of records that are read on demand


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
    """Batches of tokens, created on demand.

    Args:
        rows: Records, from :func:`record_files`.
        tokenizer: Tokenizer of the model.
        batch_size: Number of rows of a batch.
        max_length: Tokens of a record, at least 2; longer ones are cut at the end.
        batching: ``"pad"``: one example per row; those of a batch have similar lengths and are
            padded to the longest of them; ``"pack"``: rows of ``max_length`` tokens with as many
            examples as fit.
        num_lengths: For ``"pad"``: lengths of batches are multiples of ``max_length`` divided by
            this number, so at most this many programs are compiled.
        loss_on: ``"all"`` includes prompts in the loss.
        window: Number of records that are shuffled together.
        seed: Seed of the order.

    Returns:
        Batches from any position.

    Raises:
        ValueError: an option is out of range.
    """
    check_encoding(max_length, loss_on)
    one_of("batching", batching, ("pad", "pack"))
    lengths = length_multiples(max_length, num_lengths)
    arrange = arrange_by_length(_length, batch_size=batch_size)
    if batching == "pack":
        lengths = (max_length,)
        arrange = functools.partial(_packed, length=max_length)

    def encode(record: Record, tally: Tally) -> list[Example]:
        return encode_counted(record, tokenizer, tally, max_length=max_length, loss_on=loss_on)

    def collate(rows_of_batch: Sequence[tuple[Example, ...]]) -> TokenBatch:
        return _padded(rows_of_batch, lengths, tokenizer.pad_id)

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
