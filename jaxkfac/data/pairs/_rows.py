"""Rows of tokens for an encoder and a decoder."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from jaxkfac.data.pairs._encode import PairExample


class PairBatch(NamedTuple):
    """What an encoder-decoder reads and is asked for, on the host.

    Attributes:
        source: Tokens that the encoder reads.
        source_mask: Which of them exist.
        decoder_inputs: The start, and the target without its last token.
        targets: Tokens that are asked for.
        mask: Which of them exist; all that do are learnt.
    """

    source: Int[np.ndarray, "rows S"]
    source_mask: Bool[np.ndarray, "rows S"]
    decoder_inputs: Int[np.ndarray, "rows T"]
    targets: Int[np.ndarray, "rows T"]
    mask: Bool[np.ndarray, "rows T"]

    @property
    def num_tokens(self) -> int:
        """Tokens of sources and targets, without padding."""
        return int(self.source_mask.sum() + self.mask.sum())

    @property
    def num_examples(self) -> int:
        """Rows with a target."""
        return int(self.mask.any(1).sum())

    @property
    def largest_id(self) -> int:
        """Of all tokens, padding with them."""
        return int(max(self.source.max(), self.decoder_inputs.max(), self.targets.max()))

    @property
    def num_terms(self) -> int:
        """Targets that are learnt."""
        return int(self.mask.sum())


def pair_batch(
    examples: Sequence[PairExample],
    *,
    source_length: int,
    target_length: int,
    pad_id: int,
    start_id: int,
) -> PairBatch:
    """Write examples into rows, padded on the right.

    Args:
        examples: One for each row; an empty target is a row of which nothing is learnt.
        source_length: Tokens of each row of the sources.
        target_length: Tokens of each row of the targets.
        pad_id: What fills the rest.
        start_id: What the decoder reads first.

    Returns:
        A batch of ``len(examples)`` rows, int32 and bool.

    Raises:
        ValueError: an example is longer than its row.

    Example:
        >>> example = PairExample(np.array([5, 6, 1]), np.array([7, 8, 1]))
        >>> lengths = {"source_length": 4, "target_length": 4}
        >>> batch = pair_batch([example], **lengths, pad_id=0, start_id=0)
        >>> batch.source[0], batch.decoder_inputs[0], batch.targets[0]
        (array([5, 6, 1, 0]...), array([0, 7, 8, 0]...), array([7, 8, 1, 0]...))
    """
    sources, source_mask = _rows([e.source for e in examples], source_length, pad_id, "source")
    targets, mask = _rows([e.target for e in examples], target_length, pad_id, "target")
    inputs = np.roll(targets, 1, axis=1)
    inputs[:, 0] = start_id
    inputs[:, 1:][~mask[:, 1:]] = pad_id  # what ends a target is not read
    return PairBatch(sources, source_mask, inputs, targets, mask)


def _rows(
    sides: Sequence[np.ndarray], length: int, pad_id: int, name: str
) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.asarray([len(ids) for ids in sides])
    if (long := lengths.max(initial=0)) > length:
        raise ValueError(f"a {name} has {long} tokens, and its row {length}")
    mask = np.arange(length) < lengths[:, None]
    ids = np.full((len(sides), length), pad_id, np.int32)
    ids[mask] = np.concatenate(sides)
    return ids, mask
