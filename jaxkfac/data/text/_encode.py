"""Records to tokens, and which of them are learnt."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from jaxkfac._checks import one_of
from jaxkfac.data.text._records import Completion, Message, Record
from jaxkfac.data.text._tokenizer import TokenizerLike

LossOn = Literal["assistant", "all"]


class Example(NamedTuple):
    """One record in tokens.

    Attributes:
        ids: What the model reads.
        learnt: Whether the token's likelihood, given those before it, is in the loss. The
            first token never is.
    """

    ids: Int[np.ndarray, " tokens"]
    learnt: Bool[np.ndarray, " tokens"]


class Encoded(NamedTuple):
    """A data set in tokens, and what it cost.

    Attributes:
        examples: In the order of the records.
        truncated: Records that were longer and lost their end.
        dropped: Records of which nothing to learn was left.
    """

    examples: list[Example]
    truncated: int
    dropped: int

    @property
    def num_learnt(self) -> int:
        """Tokens in the loss."""
        return sum(int(example.learnt.sum()) for example in self.examples)

    def __str__(self) -> str:
        tokens = sum(len(e.ids) for e in self.examples)
        words = f"{len(self.examples)} records, {tokens} tokens, {self.num_learnt} of them learnt"
        if self.truncated or self.dropped:
            words += f"; {self.truncated} cut, {self.dropped} left out (nothing to learn fits)"
        return words


def encode_records(
    records: Sequence[Record],
    tokenizer: TokenizerLike,
    *,
    max_length: int,
    loss_on: LossOn = "assistant",
) -> Encoded:
    """Write records with a tokenizer and mark what is learnt.

    Of a chat, the turns of the assistant with the marker that ends them; of a completion, the
    completion and the end of the text. What the chat template puts before a turn ("assistant"
    and its markers) is given at generation, and not learnt.

    Args:
        records: What to learn.
        tokenizer: Of the model.
        max_length: Tokens of one record, at least 2; the end of a longer one is cut.
        loss_on: ``"all"``: prompts are learnt too.

    Returns:
        The examples, and how many were cut or left out.

    Raises:
        ValueError: nothing to learn fits in ``max_length`` at all, or the chat template writes
            a turn differently when others follow it, so that turns cannot be told apart.

    Example:
        >>> class Letters:
        ...     eos_ids, pad_id = (0,), 0
        ...     def encode(self, text, **_): return [ord(c) for c in text]
        ...     def decode(self, ids): return "".join(map(chr, ids))
        ...     def chat(self, messages, **_): return []
        >>> found = encode_records([Completion("Fe ", "iron")], Letters(), max_length=8)
        >>> found.examples[0].learnt.astype(int), found.truncated
        (array([0, 0, 0, 1, 1, 1, 1, 1]), 0)
    """
    one_of("loss_on", loss_on, ("assistant", "all"))
    if max_length < 2:
        raise ValueError(f"max_length={max_length}: expected at least 2 tokens")
    examples, truncated, dropped, longest = [], 0, 0, 0
    for record in records:
        write = _completion if isinstance(record, Completion) else _chat
        ids, learnt = write(record, tokenizer)
        if loss_on == "all":
            learnt = [True] * len(ids)
        longest = max(longest, len(ids))
        truncated += len(ids) > max_length
        example = _example(ids[:max_length], learnt[:max_length])
        if example.learnt.any():
            examples.append(example)
        else:
            dropped += 1
    if not examples:
        raise ValueError(
            f"none of {len(records)} records has anything to learn in its first {max_length} "
            f"tokens (the longest has {longest}): raise max_length"
        )
    return Encoded(examples, truncated, dropped)


def as_plain(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Turns as the dictionaries that chat templates read."""
    return [turn._asdict() for turn in messages]


def _example(ids: list[int], learnt: list[bool]) -> Example:
    marks = np.asarray(learnt, bool)
    marks[:1] = False  # nothing stands before it that it could be predicted from
    return Example(np.asarray(ids, np.int32), marks)


def _completion(record: Any, tokenizer: TokenizerLike) -> tuple[list[int], list[bool]]:
    # Apart, so that the border is the same at generation, when only the prompt is known.
    alone = not record.prompt
    prompt = [] if alone else list(tokenizer.encode(record.prompt))
    rest = [
        *tokenizer.encode(record.completion, add_special_tokens=alone),
        *tokenizer.eos_ids[:1],
    ]
    return [*prompt, *rest], [False] * len(prompt) + [True] * len(rest)


def _chat(record: Any, tokenizer: TokenizerLike) -> tuple[list[int], list[bool]]:
    turns, ends = as_plain(record.messages), set(tokenizer.eos_ids)
    ids = list(tokenizer.chat(turns, add_generation_prompt=False))
    learnt = [False] * len(ids)
    for number, turn in enumerate(turns):
        if turn["role"] != "assistant":
            continue
        before = list(tokenizer.chat(turns[:number], add_generation_prompt=True))
        last = number == len(turns) - 1
        after = (
            ids if last else list(tokenizer.chat(turns[: number + 1], add_generation_prompt=False))
        )
        if ids[: len(after)] != after or after[: len(before)] != before:
            raise ValueError(
                f"the chat template writes turn {number} differently when it is the last: its "
                'tokens cannot be told apart; train on them with loss_on="all"'
            )
        stop = len(after)
        # What follows the marker that ends a turn (a line break) is never generated.
        while stop > len(before) and ids[stop - 1] not in ends and ends & set(after[len(before) :]):
            stop -= 1
        learnt[len(before) : stop] = [True] * (stop - len(before))
    return ids, learnt
