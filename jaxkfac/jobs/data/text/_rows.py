"""Rows of tokens: padded, or with several examples in one row."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from jaxkfac.jobs.data.text._encode import Example


class TokenBatch(NamedTuple):
    """Inputs and targets of a decoder, on the host.

    Attributes:
        ids: Input tokens.
        positions: Position of each token in its example, from 0.
        segments: Number of the example in the row, from 1; 0 is padding.
        targets: The next token for each input token.
        mask: Whether a target is in the loss.
    """

    ids: Int[np.ndarray, "rows length"]
    positions: Int[np.ndarray, "rows length"]
    segments: Int[np.ndarray, "rows length"]
    targets: Int[np.ndarray, "rows length"]
    mask: Bool[np.ndarray, "rows length"]

    @property
    def num_tokens(self) -> int:
        """Number of input tokens, without padding."""
        return int((self.segments > 0).sum())

    @property
    def num_examples(self) -> int:
        """Number of examples in all rows."""
        return int(self.segments.max(1).sum())

    @property
    def largest_id(self) -> int:
        """The largest token id, including padding."""
        return int(max(self.ids.max(), self.targets.max()))

    @property
    def num_terms(self) -> int:
        """Number of targets in the loss."""
        return int(self.mask.sum())


def token_batch(rows: Sequence[Sequence[Example]], *, length: int, pad_id: int) -> TokenBatch:
    """Arrange examples in rows, one after the other.

    Examples do not mix: positions restart, segments differ, and the last token of an example,
    which has no target, is not an input.

    Args:
        rows: The examples of each row.
        length: Tokens per row.
        pad_id: Token for padding.

    Returns:
        A batch of ``len(rows)`` rows, int32 and bool.

    Raises:
        ValueError: the examples of a row are longer than ``length``.

    Example:
        >>> example = Example(np.array([5, 6, 7]), np.array([False, True, True]))
        >>> batch = token_batch([[example, example]], length=5, pad_id=0)
        >>> batch.ids[0], batch.positions[0], batch.segments[0], batch.targets[0]
        (array([5, 6, 5, 6, 0]...), array([0, 1, 0, 1, 0]...), array([1, 1, 2, 2, 0]...), array([6, 7, 6, 7, 0]...))
    """  # noqa: E501
    shape = (len(rows), length)
    ids, targets = np.full(shape, pad_id, np.int32), np.full(shape, pad_id, np.int32)
    positions, segments = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    mask = np.zeros(shape, bool)
    for row, examples in enumerate(rows):
        start = 0
        for number, example in enumerate(examples, start=1):
            stop = start + len(example.ids) - 1
            if stop > length:
                raise ValueError(f"row {row}: its examples need {stop} tokens, and it has {length}")
            ids[row, start:stop], targets[row, start:stop] = example.ids[:-1], example.ids[1:]
            positions[row, start:stop] = np.arange(stop - start)
            segments[row, start:stop] = number
            mask[row, start:stop] = example.learnt[1:]
            start = stop
    return TokenBatch(ids, positions, segments, targets, mask)


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Put examples into few rows with first fit, longest first.

    Args:
        lengths: Number of tokens of each example, at most ``capacity``.
        capacity: Number of tokens of a row.

    Returns:
        The indices of the examples in each row; every index occurs once.

    Raises:
        ValueError: an example is longer than a row.

    Example:
        >>> pack([3, 5, 2, 4], 7)
        [[1, 2], [3, 0]]
    """
    if lengths and max(lengths) > capacity:
        raise ValueError(f"an example takes {max(lengths)} tokens, and a row has {capacity}")
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fits = next((r for r, free in enumerate(room) if free >= lengths[index]), None)
        if fits is None:
            rows.append([])
            room.append(capacity)
            fits = len(rows) - 1
        rows[fits].append(index)
        room[fits] -= lengths[index]
    return rows


def bucket_lengths(lengths: Sequence[int], count: int, *, multiple: int = 8) -> tuple[int, ...]:
    """A few row lengths with little padding; a program is compiled for each.

    Args:
        lengths: Lengths of the rows.
        count: Largest number of row lengths.
        multiple: Row lengths are multiples of this.

    Returns:
        Row lengths in ascending order; the last one fits the longest row.

    Raises:
        ValueError: there are no lengths, or ``count`` is below one.

    Example:
        >>> bucket_lengths([3, 5, 9, 30], 2)
        (8, 32)
    """
    if not len(lengths) or count < 1:
        raise ValueError(f"expected lengths and a count of at least 1, got {count}")
    ends = np.quantile(np.asarray(lengths), (np.arange(count) + 1) / count, method="lower")
    return tuple(sorted({int(-(-end // multiple) * multiple) for end in ends}))
