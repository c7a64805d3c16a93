"""What is asked of a tokenizer."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class TokenizerLike(Protocol):
    """Text to ids and back; ``jaxkfac.models`` has one for each pretrained model."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text, without a chat's markers; with what begins a text, unless told not to."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids."""
        ...

    def chat(self, messages: Any, *, add_generation_prompt: bool = True) -> list[int]:
        """Ids of ``[{"role": ..., "content": ...}, ...]`` in the model's chat template.

        With ``tools=``, too, where a conversation has some.
        """
        ...

    @property
    def eos_ids(self) -> Sequence[int]:
        """Ids that end a text or a turn."""
        ...

    @property
    def pad_id(self) -> int:
        """The id that fills a row."""
        ...


@runtime_checkable
class MarksAnswers(Protocol):
    """A tokenizer whose chat template may say itself which tokens the assistant generates."""

    def marked_chat(
        self, messages: Any, *, tools: Sequence[Any] = ()
    ) -> tuple[list[int], list[bool]] | None:
        """Ids and whether each is the assistant's; ``None`` if the template marks nothing."""
        ...
