"""Training texts and queries in tokens; rows keep their numbers, and cuts are counted."""

import abc
import collections
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxkfac.files import checksum_of
from jaxkfac.jobs.cli.finetune._family import check_ids
from jaxkfac.jobs.cli.influence._options import InfluenceArguments
from jaxkfac.jobs.data.pairs import Pair, PairBatches, PairExample, encode_pair, read_pairs
from jaxkfac.jobs.data.stream import NumberedBatches, end_tokens_text
from jaxkfac.jobs.data.text import Example, TokenBatches, encode_with_ending, read_records


class NumberedText(NamedTuple):
    """One text, or one of the examples that a conversation is split into.

    Attributes:
        row: Number of the row in the file, from 1.
        example: The example in tokens, cut to length.
    """

    row: int
    example: Any


class ScoredTexts(NamedTuple):
    """The texts of a file.

    Attributes:
        texts: Texts with at least one token in the loss.
        cut: Number of texts that were cut.
        left_out: Number of texts without a token in the loss.
        endings: Number of chats by where their end token comes from; see ``EncodedRecord.end``.
    """

    texts: list[NumberedText]
    cut: int
    left_out: int
    endings: Mapping[str, int]

    def __str__(self) -> str:
        summary = f"{len(self.texts)} texts"
        if self.cut:
            summary += f", {self.cut} of them cut"
        if self.left_out:
            summary += f", {self.left_out} left out (nothing in their loss)"
        counts = (self.endings.get(name, 0) for name in ("appended", "unlearned"))
        return summary + end_tokens_text(*counts)

    @property
    def crc(self) -> str:
        """CRC-32 of all tokens."""
        examples = (text.example for text in self.texts)
        arrays = (x for tokens in examples for x in (np.int64(len(tokens[0])), *tokens))
        return checksum_of(array.tobytes() for array in arrays)


class TextReader(abc.ABC):
    """Turns texts for one kind of model into batches.

    Attributes:
        layers: Full-match pattern of the layers that count by default; ``None`` means all.
        tokens_of: Full-match pattern of the layers whose rows are the shaded tokens.
        unread: Options that this kind of model has no use for.
    """

    layers: str | None = None
    tokens_of: str | None = None
    unread: tuple[str, ...] = ()

    def __init__(self, arguments: InfluenceArguments, pretrained: Any) -> None:
        self._arguments, self._pretrained = arguments, pretrained
        self._tokenizer = pretrained.tokenizer
        self._endings = collections.Counter[str]()

    def read(self, path: Path, what: str) -> ScoredTexts:
        """Read the texts of a file.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: a row is invalid, or the loss of all texts, or of a query, is empty.
        """
        texts, cut, left_out = [], 0, 0
        self._endings.clear()
        for row, (example, was_cut) in self._examples(path):
            cut += was_cut
            if self._learnt(example):
                texts.append(NumberedText(row, example))
            elif what == "query":
                raise ValueError(
                    f"{path}: query {row} has nothing in its loss in the first "
                    f"{self._arguments.max_length} tokens: raise --max-length, or leave it out"
                )
            else:
                left_out += 1
        if not texts:
            raise ValueError(
                f"{path}: nothing of its texts is in the loss in the first "
                f"{self._arguments.max_length} tokens: raise --max-length"
            )
        largest = max(int(side.max(initial=0)) for text in texts for side in self._ids(text))
        check_ids(largest, self._pretrained.config.vocabulary)
        return ScoredTexts(texts, cut, left_out, dict(self._endings))

    def batches(
        self, texts: Sequence[NumberedText], *, start: int = 0, fill: bool = True
    ) -> Iterator[Any]:
        """All texts in order, padded to one length; filler rows without loss complete a batch.

        Args:
            texts: The texts.
            start: Index of the first text to read, at the start of a batch.
            fill: Whether to fill the last batch; otherwise it is smaller.
        """
        examples = [text.example for text in texts]
        size = min(self._arguments.batch_size, len(examples))
        return self._batched(examples, size).in_order(start, fill=fill)

    def pieces(self, text: NumberedText) -> list[str]:
        """The token read at each position."""
        return [self._tokenizer.decode([int(i)]) for i in self._read_ids(text)]

    @abc.abstractmethod
    def _examples(self, path: Path) -> Iterator[tuple[int, tuple[Any, bool]]]: ...

    @abc.abstractmethod
    def _learnt(self, example: Any) -> bool: ...

    @abc.abstractmethod
    def _ids(self, text: NumberedText) -> Sequence[np.ndarray]: ...

    @abc.abstractmethod
    def _read_ids(self, text: NumberedText) -> Sequence[int]: ...

    @abc.abstractmethod
    def _batched(self, examples: list[Any], size: int) -> NumberedBatches[Any, Any]: ...

    @abc.abstractmethod
    def shown(self, text: NumberedText) -> str:
        """The text as a string."""


class RecordReader(TextReader):
    """Reads records for a decoder."""

    unread = ("prefix", "source_key", "target_key", "max_target_length")

    def _examples(self, path: Path) -> Iterator[tuple[int, tuple[Example, bool]]]:
        longest, arguments = self._arguments.max_length, self._arguments
        if longest > (context := self._pretrained.config.longest):
            raise ValueError(
                f"max_length {longest} is longer than the model's context, {context} tokens: "
                "lower --max-length"
            )
        for row, record in enumerate(read_records(path), 1):
            try:
                encoded = encode_with_ending(record, self._tokenizer, loss_on=arguments.loss_on)
            except ValueError as error:  # the chat template refuses it
                raise ValueError(f"{path}: text {row}: {error}") from error
            self._endings[encoded.end] += 1
            for full_example in encoded.examples:
                example = Example(full_example.ids[:longest], full_example.learnt[:longest])
                yield row, (example, len(full_example.ids) > longest)

    def _learnt(self, example: Example) -> bool:
        return bool(example.learnt.any())

    def _ids(self, text: NumberedText) -> Sequence[np.ndarray]:
        return [text.example.ids]

    def _read_ids(self, text: NumberedText) -> Sequence[int]:
        return text.example.ids[:-1].tolist()

    def _batched(self, examples: list[Example], size: int) -> TokenBatches:
        return TokenBatches.padded(examples, batch_size=size, pad_id=self._tokenizer.pad_id)

    def shown(self, text: NumberedText) -> str:
        return self._tokenizer.decode(text.example.ids.tolist())


class PairReader(TextReader):
    """Reads pairs for an encoder-decoder."""

    # Relative positions add the same bias to every example's attention.
    layers = r"(?!.*relative_attention_bias/).*"
    tokens_of = r"(decoder/(?!.*(EncDecAttention/[kv]|relative_attention_bias)/).*|lm_head.*)"

    def _examples(self, path: Path) -> Iterator[tuple[int, tuple[PairExample, bool]]]:
        arguments, limits = self._arguments, self._arguments
        pairs, _ = read_pairs(path, source=arguments.source_key, target=arguments.target_key)
        for row, pair in enumerate(pairs, 1):
            example, *cut = encode_pair(
                Pair(arguments.prefix + pair.source, pair.target),
                self._tokenizer,
                max_source_length=limits.max_length,
                max_target_length=limits.max_target_length,
            )
            yield row, (example, any(cut))

    def _learnt(self, example: PairExample) -> bool:
        return bool(len(example.source) and len(example.target))

    def _ids(self, text: NumberedText) -> Sequence[np.ndarray]:
        return text.example

    def _read_ids(self, text: NumberedText) -> Sequence[int]:
        return [self._pretrained.config.start_id, *text.example.target[:-1].tolist()]

    def _batched(self, examples: list[PairExample], size: int) -> PairBatches:
        config = self._pretrained.config
        ends = {"pad_id": config.pad_id, "start_id": config.start_id}
        return PairBatches.padded(examples, batch_size=size, **ends)

    def shown(self, text: NumberedText) -> str:
        source, target = (self._tokenizer.decode(ids.tolist()) for ids in text.example)
        return f"{source} → {target}"
