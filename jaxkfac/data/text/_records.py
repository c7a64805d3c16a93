"""Records: a conversation, or a completion of a prompt."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Message(NamedTuple):
    """One turn.

    Attributes:
        role: ``"system"``, ``"user"``, ``"assistant"`` or ``"tool"``.
        content: What was said.
        more: What else a chat template may read of the turn, such as ``tool_calls`` or the
            ``name`` of a tool; empty for most.
        learnt: Whether a turn of the assistant is learnt; it is read all the same.
    """

    role: str
    content: str
    more: Mapping[str, Any] = {}
    learnt: bool = True

    def to_plain(self) -> dict[str, Any]:
        """The dictionary that chat templates read."""
        return {"role": self.role, "content": self.content, **self.more}


class Chat(NamedTuple):
    """A conversation, written with the model's chat template; its ``learnt`` answers are learnt.

    Attributes:
        messages: Its turns.
        tools: Descriptions of functions that the assistant may call, as JSON schemas.
    """

    messages: tuple[Message, ...]
    tools: tuple[Any, ...] = ()


class Completion(NamedTuple):
    """Plain text without a template; the completion is learnt.

    Attributes:
        prompt: May be empty: then all of the text is learnt.
        completion: Not empty.
    """

    prompt: str
    completion: str


Record = Chat | Completion


def as_plain(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Turns as the dictionaries that chat templates read."""
    return [turn.to_plain() for turn in messages]
