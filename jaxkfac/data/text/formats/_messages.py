"""Conversations as lists of turns with roles, and with tools."""

import json
from typing import Any

from jaxkfac.data.text._records import Chat, Message
from jaxkfac.data.text.formats._format import Row, record_format

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
        ValueError: no turn that is learnt is the assistant's, one of them is empty, or the tools
            are no list.
    """
    learnt = [(n, t) for n, t in enumerate(messages) if t.role == "assistant" and t.learnt]
    if not learnt:
        raise ValueError("no turn is the assistant's and learnt: there is nothing to learn")
    for number, turn in learnt:
        if not (turn.content.strip() or turn.more):
            raise ValueError(f"turn {number}: the assistant's answer is empty")
    tools = row.get("tools") or ()
    if isinstance(tools, str):  # columns of tables hold them as text
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
        ValueError: a turn of another form, or a role that is not known.
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
    # A table gives every turn the keys that one of them has.
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
