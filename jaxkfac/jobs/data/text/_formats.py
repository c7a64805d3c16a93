"""Formats of a row of a data set, recognized by its keys; the first match is used."""

import json
from collections.abc import Callable, Mapping
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
            ``{"conversations": [{"from": ..., "value": ...}, ...]}`` as in ShareGPT; or
            ``{"text": ...}``. Other keys, and keys without a value, are ignored.

    Returns:
        A :class:`Chat` or :class:`Completion`.

    Raises:
        ValueError: the object has none of these forms, an unknown role, no turn of the assistant,
            or nothing to learn.

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
    all_keys = "; ".join(" and ".join(f'"{key}"' for key in form.keys) for form in _FORMATS)
    raise ValueError(f"expected the keys {all_keys}; got {sorted(plain)}")


def text_of(row: Row, key: str, *, default: str | None = None) -> str:
    """A string of a row.

    Raises:
        ValueError: the value is not a string.
    """
    value = row.get(key, default)
    if not isinstance(value, str):
        raise ValueError(f"expected {key} to be a string, got {type(value).__name__}")
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
    if isinstance(tools, str):  # tables store them as text
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise ValueError(f'"tools" is a string that is no JSON ({error.msg})') from error
    if not isinstance(tools, list | tuple):
        raise ValueError(f'expected "tools" to be a list, got {type(tools).__name__}')
    return Chat(tuple(messages), tuple(tools))


def turns_of(plain: Any, key: str) -> list[Message]:
    """Turns with ``role`` and ``content``.

    Raises:
        ValueError: a turn has another form, or an unknown role.
    """
    if not isinstance(plain, list) or not plain:
        raise ValueError(f'expected "{key}" to be a list of turns that is not empty')
    return [_turn(turn, number) for number, turn in enumerate(plain)]


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
    question_parts = [text_of(row, "instruction"), text_of(row, "input", default="")]
    system, answer = text_of(row, "system", default=""), text_of(row, "output")
    if not answer:
        raise ValueError("the output is empty: there is nothing to learn")
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
    """``{"conversations": [{"from": ..., "value": ...}, ...], "system": ..., "tools": ...}``."""
    plain, system = row["conversations"], text_of(row, "system", default="")
    if not isinstance(plain, list) or not plain:
        raise ValueError('expected "conversations" to be a list of turns that is not empty')
    first = [Message("system", system)] if system else []
    return chat_of(
        [*first, *(_sharegpt_turn(turn, number) for number, turn in enumerate(plain))], row
    )


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
    prompt, completion = row.get("prompt", ""), row["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        turns = [*turns_of(prompt, "prompt"), *turns_of(completion, "completion")]
        return chat_of(turns, row)
    return _nonempty(text_of(row, "prompt", default=""), text_of(row, "completion"))


@record_format("text")
def parse_text(row: Row) -> Completion:
    """``{"text": ...}``: the whole text is in the loss."""
    return _nonempty("", text_of(row, "text"))


def _nonempty(prompt: str, completion: str) -> Completion:
    if not completion:
        raise ValueError("the completion is empty: there is nothing to learn")
    return Completion(prompt, completion)
