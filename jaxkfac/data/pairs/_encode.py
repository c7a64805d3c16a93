"""Pairs to tokens."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jaxkfac.data.pairs._pairs import Pair
from jaxkfac.data.text import TokenizerLike


class PairExample(NamedTuple):
    """One pair in tokens; every token of the target is learnt.

    Attributes:
        source: What the encoder reads.
        target: What the decoder is asked for, with the token that ends it.
    """

    source: Int[np.ndarray, " S"]
    target: Int[np.ndarray, " T"]


class EncodedPairs(NamedTuple):
    """A data set in tokens, and what it cost.

    Attributes:
        examples: In the order of the pairs.
        cut_sources: Sources that were longer and lost the middle before their end.
        cut_targets: Targets that were longer and lost their end.
    """

    examples: list[PairExample]
    cut_sources: int
    cut_targets: int

    @property
    def num_learnt(self) -> int:
        """Tokens in the loss: those of the targets."""
        return sum(len(example.target) for example in self.examples)

    def __str__(self) -> str:
        sources = sum(len(example.source) for example in self.examples)
        words = f"{len(self.examples)} pairs, {sources} source tokens, {self.num_learnt} learnt"
        if self.cut_sources or self.cut_targets:
            words += f"; {self.cut_sources} sources and {self.cut_targets} targets cut"
        return words


def encode_pair(
    pair: Pair, tokenizer: TokenizerLike, *, max_source_length: int, max_target_length: int
) -> tuple[PairExample, bool, bool]:
    """``(example, whether the source was cut, whether the target was)``."""
    source, target = (list(tokenizer.encode(text)) for text in pair)
    ends = tokenizer.eos_ids
    if ends and (not target or target[-1] not in ends):
        target.append(ends[0])
    long = len(source) > max_source_length, len(target) > max_target_length
    if long[0]:  # an encoder has seen all its sources end
        last = source[-1:] if source[-1] in ends else []
        source = source[: max_source_length - len(last)] + last
    example = PairExample(
        np.asarray(source, np.int32), np.asarray(target[:max_target_length], np.int32)
    )
    return example, *long


def check_lengths(max_source_length: int, max_target_length: int) -> None:
    """Refuse lengths in which nothing fits."""
    for name, length in (("source", max_source_length), ("target", max_target_length)):
        if length < 2:
            raise ValueError(f"max_{name}_length={length}: expected at least 2 tokens")


def encode_pairs(
    pairs: Sequence[Pair],
    tokenizer: TokenizerLike,
    *,
    max_source_length: int,
    max_target_length: int,
) -> EncodedPairs:
    """Write pairs with a tokenizer.

    The tokenizer's own end of a text stands behind each source, where it has one, and an end
    behind each target. A source that is too long is cut before its end, a target with its end.

    Args:
        pairs: What to learn.
        tokenizer: Of the model.
        max_source_length: Tokens of a source, at least 2.
        max_target_length: Tokens of a target, at least 2.

    Returns:
        The examples, and how many sides were cut.

    Raises:
        ValueError: a length is below 2, or a source of which no token is left, by its number.

    Example:
        >>> class Letters:
        ...     eos_ids, pad_id = (1,), 0
        ...     def encode(self, text, **_): return [ord(c) for c in text] + [1]
        ...     def decode(self, ids): return "".join(map(chr, ids))
        ...     def chat(self, messages, **_): return []
        >>> lengths = {"max_source_length": 3, "max_target_length": 8}
        >>> found = encode_pairs([Pair("iron", "Fe")], Letters(), **lengths)
        >>> found.examples[0].source, found.examples[0].target, found.cut_sources
        (array([105, 114,   1]...), array([ 70, 101,   1]...), 1)
    """
    check_lengths(max_source_length, max_target_length)
    lengths = {"max_source_length": max_source_length, "max_target_length": max_target_length}
    examples, cuts = [], np.zeros(2, int)
    for number, pair in enumerate(pairs, start=1):
        example, *cut = encode_pair(pair, tokenizer, **lengths)
        if not len(example.source):
            raise ValueError(f"pair {number}: the source {pair.source[:40]!r} has no tokens")
        examples.append(example)
        cuts += cut
    return EncodedPairs(examples, *cuts.tolist())
