"""Pairs of texts: a source, and a target to learn."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from jaxkfac._text import source_ids, text_ids
from jaxkfac.jobs.data.readers import FileRows, find_files, read_splits
from jaxkfac.jobs.data.text import TokenizerLike

PAIR_KEYS = (
    ("source", "target"),
    ("input", "output"),
    ("prompt", "completion"),
    ("document", "summary"),
    ("article", "highlights"),
    ("text", "summary"),
    ("question", "answer"),
    ("prompt", "response"),
    ("instruction", "response"),
)
"""Keys of sources and targets in public data sets; the first pair that is present is used."""


class Pair(NamedTuple):
    """Two texts that are not empty."""

    source: str
    target: str


def parse_pair(plain: Any, *, source: str | None = None, target: str | None = None) -> Pair:
    """Convert a JSON value to a pair.

    Args:
        plain: An object with two strings. Other keys are ignored, except that without given
            keys Alpaca's ``instruction`` is placed before its ``input``, Dolly's before its
            ``context``, and the ``context`` of a question is added to it in T5's format.
        source: Key of the source; ``None`` uses ``PAIR_KEYS``, with ``target`` if that is
            given.
        target: Key of the target, in the same way.

    Raises:
        ValueError: a key is missing, its value is not a string, or a side is empty.

    Example:
        >>> parse_pair({"document": "It rains.", "summary": "Rain."})
        Pair(source='It rains.', target='Rain.')
    """
    if not isinstance(plain, dict):
        raise ValueError(f"expected an object with keys, got {type(plain).__name__}")
    if source is None and target is None:
        plain = _with_task(plain)
    keys = _keys(plain, source, target)
    for side, key in zip(Pair._fields, keys, strict=True):
        if not isinstance(plain[key], str):
            value = plain[key]
            number = f" {value}" if isinstance(value, int | float) else ""  # NaN of a table, say
            raise ValueError(f"expected {key!r} to be a string, got {type(value).__name__}{number}")
        if not plain[key].strip():
            raise ValueError(f"the {side} ({key!r}) is empty")
    return Pair(*(plain[key] for key in keys))


def read_pairs(
    path: Path | str, *, source: str | None = None, target: str | None = None
) -> tuple[list[Pair], list[Pair]]:
    """Read pairs for training and for validation.

    Args:
        path: A file, used for training; or a folder, whose files are assigned by
            :func:`jaxkfac.jobs.data.readers.find_files`.
        source: Key of the sources; see :func:`parse_pair`.
        target: Key of the targets.

    Returns:
        ``(train, validation)``; the second may be empty.

    Raises:
        FileNotFoundError: there is no such path, or no training data in it.
        ValueError: a row is not JSON, not a pair, or has an empty side; names file and row number.
    """
    parse = functools.partial(parse_pair, source=source, target=target)
    return read_splits(path, parse)


def pair_files(
    path: Path | str,
    *,
    source: str | None = None,
    target: str | None = None,
    prefix: str = "",
    strict: bool = False,
) -> tuple[FileRows[Pair], FileRows[Pair] | None]:
    """Pairs for training and for validation, to be read on demand.

    Args:
        path: See :func:`read_pairs`.
        source: Key of the sources; see :func:`parse_pair`.
        target: Key of the targets.
        prefix: Text before each source, such as ``"summarize: "``.
        strict: Whether a bad row raises an error.

    Returns:
        ``(train, validation)``; the second may be ``None``.

    Raises:
        FileNotFoundError: there is no such path, or no training data in it.
        ValueError: a file has an unknown format.
    """

    def parse(plain: Any) -> Pair:
        pair = parse_pair(plain, source=source, target=target)
        return pair._replace(source=prefix + pair.source)

    train, validation = find_files(path)
    validation_rows = FileRows(validation, parse, strict) if validation else None
    return FileRows(train, parse, strict), validation_rows


def _with_task(plain: dict[str, Any]) -> dict[str, Any]:
    """Rows with a source in two columns."""
    texts = {key: value for key, value in plain.items() if isinstance(value, str)}
    if "instruction" in texts and "output" in texts:
        parts = texts["instruction"], texts.get("input", "")
        return plain | {"input": "\n".join(part for part in parts if part)}
    if "instruction" in texts and "response" in texts:
        parts = texts["instruction"], texts.get("context", "")
        return plain | {"instruction": "\n".join(part for part in parts if part)}
    if {"question", "context", "answer"} <= texts.keys():
        question = f"question: {texts['question']} context: {texts['context']}"
        return plain | {"question": question}
    return plain


def _keys(plain: dict[str, Any], source: str | None, target: str | None) -> Sequence[str]:
    fitting = [
        (source or source_key, target or target_key)
        for source_key, target_key in PAIR_KEYS
        if (source or source_key) in plain and (target or target_key) in plain
    ]
    if fitting:
        return fitting[0]
    all_keys = ", ".join(
        f"{source_key!r} and {target_key!r}" for source_key, target_key in PAIR_KEYS
    )
    wanted = all_keys if source is None and target is None else f"{source!r} and {target!r}"
    raise ValueError(f"expected the keys {wanted}; got {sorted(plain)}; name others as options")


# ---------------- pairs to tokens


class PairExample(NamedTuple):
    """One pair in tokens; every token of the target is in the loss.

    Attributes:
        source: Input of the encoder.
        target: Output of the decoder, including the end token.
    """

    source: Int[np.ndarray, " S"]
    target: Int[np.ndarray, " T"]


class EncodedPairs(NamedTuple):
    """A data set in tokens, with counts of truncated sides.

    Attributes:
        examples: In the order of the pairs.
        cut_sources: Number of sources that were cut before their end token.
        cut_targets: Number of targets that were cut at their end.
    """

    examples: list[PairExample]
    cut_sources: int
    cut_targets: int

    @property
    def num_learnt(self) -> int:
        """Number of tokens in the loss, those of the targets."""
        return sum(len(example.target) for example in self.examples)

    def __str__(self) -> str:
        sources = sum(len(example.source) for example in self.examples)
        summary = f"{len(self.examples)} pairs, {sources} source tokens, {self.num_learnt} learnt"
        if self.cut_sources or self.cut_targets:
            summary += f"; {self.cut_sources} sources and {self.cut_targets} targets cut"
        return summary


def encode_pair(
    pair: Pair, tokenizer: TokenizerLike, *, max_source_length: int, max_target_length: int
) -> tuple[PairExample, bool, bool]:
    """``(example, whether the source was cut, whether the target was cut)``."""
    source, target = source_ids(tokenizer, pair.source), text_ids(tokenizer, pair.target)
    ends = tokenizer.eos_ids
    is_long = len(source) > max_source_length, len(target) > max_target_length
    if is_long[0]:  # encoders are trained on sources that end with an end token
        last = source[-1:] if source[-1] in ends else []
        source = source[: max_source_length - len(last)] + last
    example = PairExample(
        np.asarray(source, np.int32), np.asarray(target[:max_target_length], np.int32)
    )
    return example, *is_long


def check_lengths(max_source_length: int, max_target_length: int) -> None:
    """Raise an error for lengths that are too small."""
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
    """Convert pairs to tokens.

    The end token that the tokenizer adds, if any, follows each source, and an end token follows
    each target. Long sources are cut before the end token, long targets at the end.

    Args:
        pairs: Pairs to learn.
        tokenizer: Tokenizer of the model.
        max_source_length: Tokens of a source, at least 2.
        max_target_length: Tokens of a target, at least 2.

    Returns:
        The examples, and the numbers of sides that were cut.

    Raises:
        ValueError: a length is below 2, or a source has no tokens; names its number.

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


# ---------------- rows of tokens for an encoder and a decoder


class PairBatch(NamedTuple):
    """Inputs and targets of an encoder-decoder, on the host.

    Attributes:
        source: Tokens for the encoder.
        source_mask: False for padding of the source.
        decoder_inputs: The start token, and the target without its last token.
        targets: Target tokens.
        mask: False for padding of the target; all other tokens are in the loss.
    """

    source: Int[np.ndarray, "rows S"]
    source_mask: Bool[np.ndarray, "rows S"]
    decoder_inputs: Int[np.ndarray, "rows T"]
    targets: Int[np.ndarray, "rows T"]
    mask: Bool[np.ndarray, "rows T"]

    @property
    def num_tokens(self) -> int:
        """Number of tokens of sources and targets, without padding."""
        return int(self.source_mask.sum() + self.mask.sum())

    @property
    def num_examples(self) -> int:
        """Number of rows with a target."""
        return int(self.mask.any(1).sum())

    @property
    def largest_id(self) -> int:
        """The largest token id, including padding."""
        return int(max(self.source.max(), self.decoder_inputs.max(), self.targets.max()))

    @property
    def num_terms(self) -> int:
        """Number of target tokens in the loss."""
        return int(self.mask.sum())


def pair_batch(
    examples: Sequence[PairExample],
    *,
    source_length: int,
    target_length: int,
    pad_id: int,
    start_id: int,
) -> PairBatch:
    """Arrange examples in rows, padded on the right.

    Args:
        examples: One example per row; rows with an empty target are not in the loss.
        source_length: Tokens per row of the sources.
        target_length: Tokens per row of the targets.
        pad_id: Token for padding.
        start_id: First token of the decoder's inputs.

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
    inputs[:, 1:][~mask[:, 1:]] = pad_id  # the end token of a target is not an input
    return PairBatch(sources, source_mask, inputs, targets, mask)


def _rows(
    sides: Sequence[np.ndarray], length: int, pad_id: int, name: str
) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.asarray([len(ids) for ids in sides])
    if (longest := lengths.max(initial=0)) > length:
        raise ValueError(f"a {name} has {longest} tokens, and its row {length}")
    mask = np.arange(length) < lengths[:, None]
    ids = np.full((len(sides), length), pad_id, np.int32)
    ids[mask] = np.concatenate(sides)
    return ids, mask
