"""Formats of a row of a data set, recognized by its keys; the first match is used."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxkfac.jobs.data.text._encode import Chat, Completion, Message, Record

# ---------------- formats of a row of a data set, recognized by its keys


Row = Mapping[str, Any]


class RecordFormat(NamedTuple):
    """A format.

    Attributes:
        keys: Keys that a row in this format has.
        parse: ``parse(row) -> record``; raises ``ValueError`` with a description.
    """

    keys: tuple[str, ...]
    parse: Callable[[Row], Record]


_FORMATS: list[RecordFormat] = []


def record_format(*keys: str) -> Callable[[Callable[[Row], Record]], Callable[[Row], Record]]:
    """Decorator that registers a function as the format of rows with all of ``keys``.

    The first match is used, in the order of registration.
    """

    def register(parse: Callable[[Row], Record]) -> Callable[[Row], Record]:
        _FORMATS.append(RecordFormat(keys, parse))
        return parse

    return register


def parse_record(plain: Any) -> Record:
    """Convert a JSON value to a record.

    Args:
        plain: ``{"messages": [{"role": ..., "content": ...}, ...]}``, with ``"tools"`` if there
            are any; ``{"prompt": ..., "completion": ...}``, of strings or of turns;
            ``{"instruction": ..., "input": ..., "output": ...}`` as in Alpaca;
            ``{"conversations": [{"from": ..., "value": ...}, ...]}`` as in ShareGPT;
            ``{"text": ...}``; or a question and its answer: ``instruction``, ``context`` and
            ``response`` as in Dolly, ``question`` and ``answer``, or ``prompt`` and ``response``.
            Turns may be a string that holds them as JSON. Other keys, and keys without a value,
            are ignored.

    Returns:
        A :class:`Chat` or :class:`Completion`.

    Raises:
        ValueError: the object has none of these forms or several of the last three, an unknown
            role, no turn of the assistant, or nothing to learn.

    Example:
        >>> parse_record({"prompt": "Fe is ", "completion": "iron"})
        Completion(prompt='Fe is ', completion='iron')
    """
    if not isinstance(plain, dict):
        raise ValueError(f"expected an object with keys, got {type(plain).__name__}")
    row = {key: value for key, value in plain.items() if value is not None}
    for form in _FORMATS:
        if all(key in row for key in form.keys):
            return form.parse(row)
    if questions := [form for form in _QUESTIONS if all(key in row for key in form.keys)]:
        if len(questions) > 1:
            raise ValueError(
                f"the row has the keys {_keys_text(questions)}, and any of these could be what is "
                "asked and answered: leave one of them"
            )
        return questions[0].parse(row)
    all_keys = _keys_text([*_FORMATS, *_QUESTIONS])
    raise ValueError(f"expected the keys {all_keys}; got {sorted(plain)}")


def _keys_text(forms: Sequence[RecordFormat]) -> str:
    return "; ".join(" and ".join(f'"{key}"' for key in form.keys) for form in forms)


def text_of(row: Row, key: str, *, default: str | None = None) -> str:
    """A string of a row.

    Raises:
        ValueError: the value is not a string.
    """
    value = row.get(key, default)
    if not isinstance(value, str):
        number = f" {value}" if isinstance(value, int | float) else ""  # NaN of a table, say
        raise ValueError(f"expected {key} to be a string, got {type(value).__name__}{number}")
    return value


# ---------------- conversations as lists of turns with roles, and with tools


_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant",
          "tool": "tool"}  # fmt: skip
_OWN_KEYS = ("role", "content", "weight")


@record_format("messages")
def parse_messages(row: Row) -> Chat:
    """``{"messages": [{"role": ..., "content": ...}, ...], "tools": [...]}``."""
    return chat_of(turns_of(row["messages"], "messages"), row)


def chat_of(messages: list[Message], row: Row) -> Chat:
    """A conversation with the tools of its row.

    Raises:
        ValueError: no turn of the assistant is in the loss, one of them is empty, or the tools
            are not a list.
    """
    learnt = [(n, t) for n, t in enumerate(messages) if t.role == "assistant" and t.learnt]
    if not learnt:
        raise ValueError("no turn of the assistant is learnt: there is nothing to learn")
    for number, turn in learnt:
        if not (turn.content.strip() or turn.more):
            raise ValueError(f"turn {number}: the assistant's answer is empty")
    tools = row.get("tools") or ()
    if isinstance(tools, str):
        tools = _from_json(tools, "tools")
    if not isinstance(tools, list | tuple):
        raise ValueError(f'expected "tools" to be a list, got {type(tools).__name__}')
    return Chat(tuple(messages), tuple(tools))


def turns_of(plain: Any, key: str) -> list[Message]:
    """Turns with ``role`` and ``content``.

    Raises:
        ValueError: a turn has another form, or an unknown role.
    """
    return [_turn(turn, number) for number, turn in enumerate(_listed(plain, key))]


def _listed(plain: Any, key: str) -> list[Any]:
    """The turns of a row, which tables also store as text."""
    if isinstance(plain, str):
        plain = _from_json(plain, key)
    if not isinstance(plain, list) or not plain:
        raise ValueError(f'expected "{key}" to be a list of turns that is not empty')
    return plain


def _from_json(text: str, key: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        what = error.msg if isinstance(error, json.JSONDecodeError) else error
        raise ValueError(f'"{key}" is a string that is no JSON ({what})') from error


def _turn(turn: Any, number: int) -> Message:
    if not isinstance(turn, dict):
        raise ValueError(f'turn {number}: expected {{"role": ..., "content": "..."}}')
    role = turn.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise ValueError(f"turn {number}: role {role!r}, expected one of {tuple(_ROLES)}")
    # In a table every turn has the keys that any of them has.
    more = {k: v for k, v in turn.items() if v is not None and k not in _OWN_KEYS}
    weight = 1 if turn.get("weight") is None else turn["weight"]
    if weight not in (0, 1):
        raise ValueError(f"turn {number}: weight {weight!r}, expected 0 (not learnt) or 1")
    content = turn.get("content")
    if content is None and more.get("tool_calls"):
        content = ""
    if isinstance(content, list) and all(_is_text(part) for part in content):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise ValueError(f'turn {number}: expected {{"role": ..., "content": "..."}}')
    return Message(_ROLES[role], content, more, learnt=weight == 1)


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


# ---------------- instructions with an optional input, as in Alpaca


@record_format("instruction", "output")
def parse_alpaca(row: Row) -> Chat:
    """``{"instruction": ..., "input": ..., "output": ..., "system": ...}`` as a chat of two turns.

    The input, if any, follows the instruction.
    """
    return _question_and_answer(row, "instruction", "input", "output")


def _question_and_answer(row: Row, asked: str, passage: str, answered: str) -> Chat:
    """Two turns, after the system's if any: what is asked, and a passage if any; the answer."""
    question_parts = [text_of(row, asked), text_of(row, passage, default="")]
    system, answer = text_of(row, "system", default=""), text_of(row, answered)
    if not answer:
        raise ValueError(f"the {answered} is empty: there is nothing to learn")
    first = (Message("system", system),) if system else ()
    question = Message("user", "\n\n".join(filter(None, question_parts)))
    return Chat((*first, question, Message("assistant", answer)))


# ---------------- conversations as lists of speakers and texts, as in ShareGPT


_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}


@record_format("conversations")
def parse_sharegpt(row: Row) -> Chat:
    """``{"conversations": [{"from": ..., "value": ...}, ...], "system": ..., "tools": ...}``.

    Turns with ``role`` and ``content`` under this key are read as those of ``messages``.
    """
    plain = _listed(row["conversations"], "conversations")
    system = text_of(row, "system", default="")
    first = [Message("system", system)] if system else []
    parse = _turn if all(isinstance(x, dict) and "role" in x for x in plain) else _sharegpt_turn
    return chat_of([*first, *(parse(turn, number) for number, turn in enumerate(plain))], row)


def _sharegpt_turn(turn: Any, number: int) -> Message:
    if not (isinstance(turn, dict) and isinstance(turn.get("value"), str)):
        raise ValueError(f'turn {number}: expected {{"from": ..., "value": "..."}}')
    speaker = str(turn.get("from")).lower()
    if speaker not in _SHAREGPT_ROLES:
        raise ValueError(
            f"turn {number}: from {speaker!r}, expected one of {tuple(_SHAREGPT_ROLES)}"
        )
    if speaker == "function_call":
        return Message("assistant", "", {"tool_calls": [_call(turn["value"], number)]})
    return Message(_SHAREGPT_ROLES[speaker], turn["value"])


def _call(value: str, number: int) -> dict[str, Any]:
    try:
        call = json.loads(value)
        function = {"name": call["name"], "arguments": call["arguments"]}
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f'turn {number}: expected a call such as {{"name": ..., "arguments": {{...}}}}'
        ) from error
    return {"type": "function", "function": function}


# ---------------- a prompt with its completion, or only text


@record_format("completion")
def parse_completion(row: Row) -> Record:
    """``{"prompt": ..., "completion": ...}``: both strings, or both lists of turns."""
    return _continued(row, "completion")


def _continued(row: Row, answered: str) -> Record:
    prompt, completion = row.get("prompt", ""), row[answered]
    if isinstance(prompt, list) and isinstance(completion, list):
        turns = [*turns_of(prompt, "prompt"), *turns_of(completion, answered)]
        return chat_of(turns, row)
    return _nonempty(text_of(row, "prompt", default=""), text_of(row, answered))


@record_format("text")
def parse_text(row: Row) -> Completion:
    """``{"text": ...}``: the whole text is in the loss."""
    return _nonempty("", text_of(row, "text"))


def _nonempty(prompt: str, completion: str) -> Completion:
    if not completion:
        raise ValueError("the completion is empty: there is nothing to learn")
    return Completion(prompt, completion)


# ---------------- a question and its answer, in the names that data sets give them
#
# After all other forms, also registered ones, so that these keep their meaning where a row also
# has such keys. A row with several of them is refused: which one to learn is a guess.


_QUESTIONS = (
    RecordFormat(
        ("instruction", "response"),
        lambda row: _question_and_answer(row, "instruction", "context", "response"),
    ),
    RecordFormat(
        ("question", "answer"),
        lambda row: _question_and_answer(row, "question", "context", "answer"),
    ),
    RecordFormat(("prompt", "response"), lambda row: _continued(row, "response")),
)
