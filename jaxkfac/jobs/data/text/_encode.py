"""Records to tokens, with a mask of the tokens in the loss."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Int

from jaxkfac._errors import one_of
from jaxkfac._text import answer_ids, closed_ids, prompt_ids, text_ids
from jaxkfac.jobs.data.stream import Tally, end_tokens_text

# ---------------- records: a conversation, or a completion of a prompt


class Message(NamedTuple):
    """One turn.

    Attributes:
        role: ``"system"``, ``"user"``, ``"assistant"`` or ``"tool"``.
        content: Text of the turn.
        more: Other entries for the chat template, such as ``tool_calls`` or the ``name`` of a
            tool; usually empty.
        learnt: Whether a turn of the assistant is in the loss; it is always an input.
    """

    role: str
    content: str
    more: Mapping[str, Any] = {}
    learnt: bool = True

    def to_plain(self) -> dict[str, Any]:
        """The dictionary that chat templates read."""
        return {"role": self.role, "content": self.content, **self.more}


class Chat(NamedTuple):
    """A conversation in the model's chat template, with its ``learnt`` answers in the loss.

    Attributes:
        messages: Its turns.
        tools: Descriptions of functions that the assistant may call, as JSON schemas.
    """

    messages: tuple[Message, ...]
    tools: tuple[Any, ...] = ()


class Completion(NamedTuple):
    """Plain text without a template; the completion is in the loss.

    Attributes:
        prompt: May be empty; then the whole text is in the loss.
        completion: Must not be empty.
    """

    prompt: str
    completion: str


Record = Chat | Completion


def as_plain(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Turns as the dictionaries that chat templates read."""
    return [turn.to_plain() for turn in messages]


# ---------------- the interface of a tokenizer


@runtime_checkable
class TokenizerLike(Protocol):
    """Text to ids and back; ``jaxkfac.models`` has a tokenizer for each pretrained model."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text without chat markers, by default with the start token of a text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a sequence of ids."""
        ...

    def chat(self, messages: Any, *, add_generation_prompt: bool = True) -> list[int]:
        """Ids of ``[{"role": ..., "content": ...}, ...]`` in the model's chat template.

        Also takes ``tools=``, for conversations that have some.
        """
        ...

    @property
    def eos_ids(self) -> Sequence[int]:
        """Ids that end a text or a turn."""
        ...

    @property
    def pad_id(self) -> int:
        """The id for padding."""
        ...


@runtime_checkable
class MarksAnswers(Protocol):
    """A tokenizer whose chat template may mark the tokens that the assistant generates."""

    def marked_chat(
        self, messages: Any, *, tools: Sequence[Any] = ()
    ) -> tuple[list[int], list[bool]] | None:
        """Ids, and whether each is generated; ``None`` if the template has no marks."""
        ...


# ---------------- tokens of a record


LossOn = Literal["assistant", "all"]


class Example(NamedTuple):
    """One record in tokens.

    Attributes:
        ids: Input tokens.
        learnt: Whether the likelihood of the token, given the previous ones, is in the loss.
            Always false for the first token.
    """

    ids: Int[np.ndarray, " tokens"]
    learnt: Bool[np.ndarray, " tokens"]


class Encoded(NamedTuple):
    """A data set in tokens, with counts of truncated examples.

    Attributes:
        examples: In the order of the records.
        truncated: Number of examples that were cut at their end.
        dropped: Number of examples without a token in the loss.
        appended: Chats whose template writes no end token: the tokenizer's was appended.
        unlearned: Chats whose template writes one outside its ``{% generation %}`` marks.
    """

    examples: list[Example]
    truncated: int
    dropped: int
    appended: int = 0
    unlearned: int = 0

    @property
    def num_learnt(self) -> int:
        """Tokens in the loss."""
        return sum(int(example.learnt.sum()) for example in self.examples)

    def __str__(self) -> str:
        tokens = sum(len(e.ids) for e in self.examples)
        summary = f"{len(self.examples)} records, {tokens} tokens, {self.num_learnt} of them learnt"
        if self.truncated or self.dropped:
            summary += f"; {self.truncated} cut, {self.dropped} left out (nothing to learn fits)"
        return summary + end_tokens_text(self.appended, self.unlearned)


def encode_records(
    records: Sequence[Record],
    tokenizer: TokenizerLike,
    *,
    max_length: int,
    loss_on: LossOn = "assistant",
) -> Encoded:
    """Convert records to tokens and mark the tokens in the loss.

    For a chat, these are the assistant's turns with the marker that ends them; for a completion,
    the completion and the end token. What the chat template writes before a turn ("assistant" and
    its markers) is given at generation, so it is not in the loss. If the template writes no end
    token behind the last answer, the tokenizer's is appended and is in the loss.

    A text or a prompt begins with the tokens that the tokenizer adds in front, once. What it adds
    behind a text ends a text or an answer, once; it never stands between prompt and answer.

    If the chat template marks answers (``{% generation %}``), these marks are used. Otherwise, or
    if some answers are not in the loss, turns are found by rendering the conversation up to each
    of them; if the template changes earlier turns when others follow, the conversation becomes one
    example for each turn of the assistant.

    Args:
        records: Records to learn.
        tokenizer: Tokenizer of the model.
        max_length: Tokens of one record, at least 2; longer ones are cut at the end.
        loss_on: ``"all"`` includes prompts in the loss.

    Returns:
        The examples, and how many were cut or dropped.

    Raises:
        ValueError: no token in the loss fits in ``max_length``, or the chat template refuses a
            record or changes the turns before an answer when the answer is added; names the
            record.

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
    check_encoding(max_length, loss_on)
    examples, tally, options = [], Tally(), {"max_length": max_length, "loss_on": loss_on}
    for number, record in enumerate(records, start=1):
        try:
            examples += encode_counted(record, tokenizer, tally, **options)
        except ValueError as error:
            raise ValueError(f"record {number}: {error}") from error
    if not examples:
        raise ValueError(
            f"none of {len(records)} records has anything to learn in its first {max_length} "
            f"tokens (the longest has {tally.longest}): raise max_length"
        )
    return Encoded(examples, tally.truncated, tally.dropped, tally.appended, tally.unlearned)


def encode_counted(
    record: Record, tokenizer: TokenizerLike, tally: Tally, *, max_length: int, loss_on: LossOn
) -> list[Example]:
    """The examples of a record, cut to length, without those that leave nothing to learn."""
    encoded, examples = encode_with_ending(record, tokenizer, loss_on=loss_on), []
    tally.appended += encoded.end == "appended"
    tally.unlearned += encoded.end == "unlearned"
    for example in encoded.examples:
        tally.longest = max(tally.longest, len(example.ids))
        tally.truncated += len(example.ids) > max_length
        example = truncate(example, max_length)
        if not example.learnt.any():
            tally.dropped += 1
            continue
        tally.examples += 1
        tally.tokens += len(example.ids)
        tally.learnt += int(example.learnt.sum())
        examples.append(example)
    return examples


def check_encoding(max_length: int, loss_on: str) -> None:
    """Raise an error for invalid options of :func:`encode_records`."""
    one_of("loss_on", loss_on, ("assistant", "all"))
    if max_length < 2:
        raise ValueError(f"max_length={max_length}: expected at least 2 tokens")


EndToken = Literal["written", "appended", "unlearned"]


class EncodedRecord(NamedTuple):
    """One record in tokens.

    Attributes:
        examples: One, or one for each answer if the chat template requires that.
        end: Whether the end token behind the last answer is written by the template (or by the
            tokenizer, for a completion), was appended, or is written but is not in the loss.
    """

    examples: list[Example]
    end: EndToken


def encode_with_ending(
    record: Record, tokenizer: TokenizerLike, *, loss_on: LossOn = "assistant"
) -> EncodedRecord:
    """One record, not cut, and where its end token comes from."""
    end: EndToken = "written"
    if isinstance(record, Completion):
        marked = [_completion(record, tokenizer)]
    else:
        marked, end = _ended(_chat(record, tokenizer, whole=loss_on == "all"), record, tokenizer)
    if loss_on == "all":
        marked = [_Marked(x.ids, [True] * len(x.ids)) for x in marked]
        end = "written" if end == "unlearned" else end
    return EncodedRecord([_example(x.ids, x.learnt) for x in marked], end)


def truncate(example: Example, max_length: int) -> Example:
    """The first tokens of an example."""
    return Example(example.ids[:max_length], example.learnt[:max_length])


def _example(ids: Sequence[int], learnt: Sequence[bool]) -> Example:
    marks = np.asarray(learnt, bool)
    marks[:1] = False  # there is no context to predict it from
    return Example(np.asarray(ids, np.int32), marks)


class _Marked(NamedTuple):
    """Tokens, whether each is in the loss, and how many turns of a chat they hold."""

    ids: list[int]
    learnt: list[bool]
    num_turns: int = 0


def _completion(record: Completion, tokenizer: TokenizerLike) -> _Marked:
    if not record.prompt:
        ids = text_ids(tokenizer, record.completion)
        return _Marked(ids, [True] * len(ids))
    # The boundary is the same at generation, when only the prompt is known.
    prompt = prompt_ids(tokenizer, record.prompt)
    answer = answer_ids(tokenizer, record.prompt, record.completion)
    return _Marked([*prompt, *answer], [False] * len(prompt) + [True] * len(answer))


def _ended(
    marked: list[_Marked], record: Chat, tokenizer: TokenizerLike
) -> tuple[list[_Marked], EndToken]:
    """The examples of a chat, with an end token behind each one's last answer."""
    closed = [_one_ended(one, record, tokenizer) for one in marked]
    unusual: list[EndToken] = [end for _, end in closed if end != "written"]
    return [example for example, _ in closed], unusual[0] if unusual else "written"


def _one_ended(marked: _Marked, record: Chat, tokenizer: TokenizerLike) -> tuple[_Marked, EndToken]:
    ids, learnt, num_turns = marked
    last, ends = record.messages[num_turns - 1], set(tokenizer.eos_ids)
    if last.role != "assistant" or not ends:
        return marked, "written"
    before = as_plain(record.messages[: num_turns - 1])
    start = _shared(ids, tokenizer.chat(before, add_generation_prompt=False, **_tools(record)))
    if not ends & set(ids[start:]):
        closed = closed_ids(tokenizer, ids)
        new = [last.learnt] * (len(closed) - len(ids))
        return _Marked(closed, [*learnt, *new], num_turns), "appended"
    is_learnt = any(x and i in ends for i, x in zip(ids[start:], learnt[start:], strict=False))
    return marked, "written" if is_learnt or not last.learnt else "unlearned"


def _shared(ids: Sequence[int], others: Sequence[int]) -> int:
    """Number of tokens that two sequences have in common at their beginning."""
    return next((n for n, (a, b) in enumerate(zip(ids, others)) if a != b), len(others))


def _tools(record: Chat) -> dict[str, Any]:
    return {"tools": record.tools} if record.tools else {}


def _chat(record: Chat, tokenizer: TokenizerLike, *, whole: bool) -> list[_Marked]:
    turns = as_plain(record.messages)
    tools = _tools(record)
    if whole:
        ids = list(tokenizer.chat(turns, add_generation_prompt=False, **tools))
        return [_Marked(ids, [], len(turns))]
    all_learnt = all(turn.learnt for turn in record.messages if turn.role == "assistant")
    if all_learnt and isinstance(tokenizer, MarksAnswers):
        marked = tokenizer.marked_chat(turns, **tools)
        if marked is not None:
            return [_Marked(*marked, len(turns))]
    learnt = [n for n, t in enumerate(record.messages) if t.role == "assistant" and t.learnt]
    answers = [_answer(turns, number, tokenizer, tools) for number in learnt]
    ids, _ = answers[-1]
    if any(ids[: len(before)] != before for before, _ in answers):
        return [
            _Marked(conversation, _between(conversation, [span]), number + 1)
            for number, (conversation, span) in zip(learnt, answers, strict=True)
        ]
    return [_Marked(ids, _between(ids, [span for _, span in answers]), learnt[-1] + 1)]


def _answer(
    turns: list[dict[str, Any]], number: int, tokenizer: TokenizerLike, tools: dict[str, Any]
) -> tuple[list[int], tuple[int, int]]:
    """The conversation up to a turn of the assistant, and the position of the turn in it."""
    ends = set(tokenizer.eos_ids)
    before = tokenizer.chat(turns[:number], add_generation_prompt=True, **tools)
    ids = list(tokenizer.chat(turns[: number + 1], add_generation_prompt=False, **tools))
    start, stop = len(before), len(ids)
    if ids[:start] != list(before):
        start = _start(turns, number, before, ids, tokenizer, tools)
    # Text after the marker that ends a turn (a line break) is never generated.
    while stop > start and ids[stop - 1] not in ends and ends & set(ids[start:]):
        stop -= 1
    return ids, (start, stop)


def _start(
    turns: list[dict[str, Any]],
    number: int,
    before: Sequence[int],
    ids: Sequence[int],
    tokenizer: TokenizerLike,
    tools: dict[str, Any],
) -> int:
    """The start of an answer that does not begin with the generation prompt (an empty thought)."""
    conversation = list(tokenizer.chat(turns[:number], add_generation_prompt=False, **tools))
    if ids[: len(conversation)] != conversation:
        raise ValueError(
            f"the chat template writes the text before turn {number} differently when it is "
            'there: its tokens cannot be told apart; train on them with loss_on="all"'
        )
    return next(i for i, (a, b) in enumerate(zip(before, [*ids, None])) if a != b)


def _between(ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> list[bool]:
    marks = [False] * len(ids)
    for start, stop in spans:
        marks[start:stop] = [True] * (stop - start)
    return marks
