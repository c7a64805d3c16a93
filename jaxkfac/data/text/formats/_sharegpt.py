"""Conversations as lists of speakers and what they said, as in ShareGPT."""

import json
from typing import Any

from jaxkfac.data.text._records import Chat, Message
from jaxkfac.data.text.formats._format import Row, record_format, text_of
from jaxkfac.data.text.formats._messages import chat_of

_ROLES = {
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
    return chat_of([*first, *(_turn(turn, number) for number, turn in enumerate(plain))], row)


def _turn(turn: Any, number: int) -> Message:
    if not (isinstance(turn, dict) and isinstance(turn.get("value"), str)):
        raise ValueError(f'turn {number}: expected {{"from": ..., "value": "..."}}')
    speaker = str(turn.get("from")).lower()
    if speaker not in _ROLES:
        raise ValueError(f"turn {number}: from {speaker!r}, expected one of {tuple(_ROLES)}")
    if speaker == "function_call":
        return Message("assistant", "", {"tool_calls": [_call(turn["value"], number)]})
    return Message(_ROLES[speaker], turn["value"])


def _call(value: str, number: int) -> dict[str, Any]:
    try:
        call = json.loads(value)
        function = {"name": call["name"], "arguments": call["arguments"]}
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f'turn {number}: expected a call such as {{"name": ..., "arguments": {{...}}}}'
        ) from error
    return {"type": "function", "function": function}
