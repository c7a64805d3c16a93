"""Questions as tokens: each choice after its prompt."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from jaxkfac._errors import one_of
from jaxkfac.data.choices._questions import Question
from jaxkfac.data.text._encode import Example
from jaxkfac.data.text._tokenizer import TokenizerLike

PromptStyle = Literal["chat", "plain"]


def choice_examples(
    questions: Sequence[Question],
    tokenizer: TokenizerLike,
    *,
    style: PromptStyle,
    system: str,
    max_length: int,
) -> list[list[Example]]:
    """For each question its choices after the prompt; the choice's tokens are marked.

    Raises:
        ValueError: a question does not fit ``max_length``, or a choice has no tokens.
    """
    return [
        [
            _example(_prompt(q.stem, tokenizer, style, system), choice, tokenizer, style, q.id,
                     max_length)
            for choice in q.choices
        ]
        for q in questions
    ]  # fmt: skip


def bare_examples(
    questions: Sequence[Question], tokenizer: TokenizerLike, *, style: PromptStyle, system: str
) -> dict[str, Example]:
    """Each distinct choice after ``Answer:`` alone, for its likelihood without the question."""
    prompt = _prompt("Answer:" if style == "chat" else "", tokenizer, style, system)
    texts = dict.fromkeys(choice for q in questions for choice in q.choices)
    return {text: _example(prompt, text, tokenizer, style, text, None) for text in texts}


def _prompt(stem: str, tokenizer: TokenizerLike, style: PromptStyle, system: str) -> list[int]:
    one_of("style", style, ("chat", "plain"))
    if style == "plain":
        return list(tokenizer.encode(f"{stem}\nAnswer:" if stem else "Answer:"))
    turns = [{"role": "system", "content": system}] if system else []
    turns.append({"role": "user", "content": stem})
    return list(tokenizer.chat(turns, add_generation_prompt=True))


def _example(
    prompt: list[int],
    choice: str,
    tokenizer: TokenizerLike,
    style: PromptStyle,
    name: str,
    max_length: int | None,
) -> Example:
    answer = tokenizer.encode(choice if style == "chat" else f" {choice}", add_special_tokens=False)
    if not answer or not prompt:
        raise ValueError(f"question {name!r}: the choice {choice!r} or its prompt has no tokens")
    ids = np.asarray([*prompt, *answer], np.int32)
    if max_length is not None and len(ids) > max_length:
        raise ValueError(
            f"question {name!r} takes {len(ids)} tokens with the choice {choice!r}, and at most "
            f"{max_length} fit: raise max_length, or leave the question out"
        )
    return Example(ids, np.arange(len(ids)) >= len(prompt))
