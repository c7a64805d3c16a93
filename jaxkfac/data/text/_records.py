"""Records: a conversation, or a completion of a prompt."""

from typing import Any, NamedTuple

ROLES = ("system", "user", "assistant")


class Message(NamedTuple):
    """One turn.

    Attributes:
        role: ``"system"``, ``"user"`` or ``"assistant"``.
        content: What was said.
    """

    role: str
    content: str


class Chat(NamedTuple):
    """A conversation, written with the model's chat template; the assistant's turns are learnt."""

    messages: tuple[Message, ...]


class Completion(NamedTuple):
    """Plain text without a template; the completion is learnt.

    Attributes:
        prompt: May be empty: then all of the text is learnt.
        completion: Not empty.
    """

    prompt: str
    completion: str


Record = Chat | Completion


def parse_record(plain: Any) -> Record:
    """A record from what JSON gives.

    Args:
        plain: ``{"messages": [{"role": ..., "content": ...}, ...]}``,
            ``{"prompt": ..., "completion": ...}`` or ``{"text": ...}``. Other keys are ignored.

    Returns:
        A :class:`Chat` or :class:`Completion`.

    Raises:
        ValueError: none of these forms, a role that is not known, no turn of the assistant, or
            nothing to learn.

    Example:
        >>> parse_record({"prompt": "Fe is ", "completion": "iron"})
        Completion(prompt='Fe is ', completion='iron')
    """
    if not isinstance(plain, dict):
        raise ValueError(f"expected an object with keys, got {type(plain).__name__}")
    if "messages" in plain:
        return Chat(_messages(plain["messages"]))
    if "completion" in plain:
        prompt, completion = plain.get("prompt", ""), plain["completion"]
    elif "text" in plain:
        prompt, completion = "", plain["text"]
    else:
        raise ValueError(
            'expected the key "messages", the keys "prompt" and "completion", or the key "text"; '
            f"got {sorted(plain)}"
        )
    for name, value in (("prompt", prompt), ("completion or text", completion)):
        if not isinstance(value, str):
            raise ValueError(f"expected {name} to be a string, got {type(value).__name__}")
    if not completion:
        raise ValueError("the completion is empty: there is nothing to learn")
    return Completion(prompt, completion)


def _messages(plain: Any) -> tuple[Message, ...]:
    if not isinstance(plain, list) or not plain:
        raise ValueError('expected "messages" to be a list of turns that is not empty')
    messages = []
    for number, turn in enumerate(plain):
        if not (isinstance(turn, dict) and isinstance(turn.get("content"), str)):
            raise ValueError(f'turn {number}: expected {{"role": ..., "content": "..."}}')
        if turn.get("role") not in ROLES:
            raise ValueError(f"turn {number}: role {turn.get('role')!r}, expected one of {ROLES}")
        messages.append(Message(turn["role"], turn["content"]))
    if not any(turn.role == "assistant" for turn in messages):
        raise ValueError("no turn is the assistant's: there is nothing to learn")
    return tuple(messages)
