"""Questions with choices, and their file format."""

import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxkfac._errors import one_of
from jaxkfac._text import continuation_ids, prompt_ids
from jaxkfac.jobs.data.readers import read_rows
from jaxkfac.jobs.data.text._encode import Example, TokenizerLike


class Question(NamedTuple):
    """A question with several answers, one of which is correct.

    Attributes:
        id: Its identifier in the file.
        stem: The question, or the sentence that an answer completes.
        choices: Texts of the answers.
        labels: Their labels, such as A to D.
        answer: Index of the correct answer.
    """

    id: str
    stem: str
    choices: tuple[str, ...]
    labels: tuple[str, ...]
    answer: int

    def to_plain(self) -> dict[str, Any]:
        """The object in OpenBookQA's file format."""
        choices = [{"text": t, "label": n} for t, n in zip(self.choices, self.labels, strict=True)]
        return {
            "id": self.id,
            "question": {"stem": self.stem, "choices": choices},
            "answerKey": self.labels[self.answer],
        }


def read_questions(path: Path | str) -> list[Question]:
    """Read the questions of a file, in order.

    Args:
        path: Rows as accepted by :func:`parse_question`, in any format of
            :mod:`jaxkfac.jobs.data.readers`.

    Returns:
        At least one question.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a row is not JSON or not a question, or its answer key is not one of its
            labels; names file and row number.

    References:
        T. Mihaylov, P. Clark, T. Khot, A. Sabharwal, Can a Suit of Armor Conduct Electricity? A
        New Dataset for Open Book Question Answering, 2018.
    """
    return read_rows(path, parse_question)


def parse_question(plain: Any) -> Question:
    """Convert a JSON value to a question.

    Args:
        plain: In the format of OpenBookQA ``{"id", "question": {"stem", "choices": [{"text",
            "label"}, ...]}, "answerKey"}``; in that of the datasets library ``{"question_stem" or
            "question", "choices": {"text": [...], "label": [...]}, "answerKey"}``; or
            ``{"question", "choices": [...], "answer": index}`` as in MMLU. Without an ``"id"``
            the question is used as the identifier.

    Raises:
        ValueError: a key is missing or has the wrong type, there are fewer than two choices, two
            with the same label, or the answer key is not one of the labels.

    Example:
        >>> parse_question({"id": "1", "answerKey": "B", "question_stem": "Fe is",
        ...                 "choices": {"text": ["lead", "iron"], "label": ["A", "B"]}}).answer
        1
    """
    try:
        stem, texts, labels, key = _parts(plain)
    except (KeyError, TypeError, IndexError) as error:
        problem = f"the key {error} is missing" if isinstance(error, KeyError) else str(error)
        raise ValueError(
            f"{problem}; "
            'expected {"id", "question": {"stem", "choices": [{"text", "label"}, ...]}, '
            '"answerKey"}, or {"question_stem", "choices": {"text": [...], "label": [...]}, '
            '"answerKey"}'
        ) from error
    name = str(plain.get("id", stem))
    if not all(isinstance(x, str) and x for x in (stem, *texts, *labels)):
        raise ValueError(f"question {name!r}: stem, texts and labels must be non-empty strings")
    if len(texts) < 2 or len(texts) != len(labels) or len(set(labels)) < len(labels):
        raise ValueError(
            f"question {name!r}: expected two or more labels, one for each choice, got "
            f"{list(texts)} and {list(labels)}"
        )
    if key not in labels:
        raise ValueError(
            f"question {name!r}: the answer key {key!r} is none of its labels {list(labels)}"
        )
    return Question(name, stem, texts, labels, labels.index(key))


def _parts(plain: Any) -> tuple[Any, tuple[Any, ...], tuple[Any, ...], Any]:
    """``(stem, texts, labels, key)``."""
    if "question_stem" in plain:
        stem, choices = plain["question_stem"], plain["choices"]
    elif isinstance(plain["question"], str):
        stem, choices = plain["question"], plain["choices"]
    else:
        stem, choices = plain["question"]["stem"], plain["question"]["choices"]
    if isinstance(choices, dict):
        return stem, tuple(choices["text"]), tuple(choices["label"]), plain["answerKey"]
    if choices and all(isinstance(choice, str) for choice in choices):
        if len(choices) > len(string.ascii_uppercase):
            raise ValueError(
                f"question {stem!r}: {len(choices)} choices without labels; at most 26 get letters"
            )
        labels = tuple(string.ascii_uppercase[: len(choices)])
        label_of_index = dict(enumerate(labels))  # data sets without answers use -1
        return stem, tuple(choices), labels, label_of_index.get(plain["answer"], plain["answer"])
    texts = tuple(choice["text"] for choice in choices)
    return stem, texts, tuple(choice["label"] for choice in choices), plain["answerKey"]


# ---------------- questions as tokens: each choice after its prompt


PromptStyle = Literal["chat", "plain"]
_ANSWER = "Answer:"


def choice_examples(
    questions: Sequence[Question],
    tokenizer: TokenizerLike,
    *,
    style: PromptStyle,
    system: str,
    max_length: int,
) -> list[list[Example]]:
    """The choices of each question after the prompt; tokens of the choice are marked.

    Raises:
        ValueError: a question is longer than ``max_length``, or a choice has no tokens.
    """
    return [
        [
            _example(question_prompt(q.stem, tokenizer, style=style, system=system), choice,
                     tokenizer, style, q.id, max_length)
            for choice in q.choices
        ]
        for q in questions
    ]  # fmt: skip


def bare_examples(
    questions: Sequence[Question], tokenizer: TokenizerLike, *, style: PromptStyle, system: str
) -> dict[str, Example]:
    """Each distinct choice after ``Answer:`` only, for its likelihood without the question."""
    stem = _ANSWER if style == "chat" else ""
    prompt = question_prompt(stem, tokenizer, style=style, system=system)
    texts = dict.fromkeys(choice for q in questions for choice in q.choices)
    return {text: _example(prompt, text, tokenizer, style, text, None) for text in texts}


def question_prompt(
    stem: str, tokenizer: TokenizerLike, *, style: PromptStyle, system: str = ""
) -> list[int]:
    """Ids that a choice, or a generated answer, follows.

    Args:
        stem: The question; empty for ``Answer:`` alone.
        tokenizer: Tokenizer of the model.
        style: ``"chat"``: a turn of the user; ``"plain"``: ``stem`` and ``Answer:``.
        system: System message of a chat.
    """
    one_of("style", style, ("chat", "plain"))
    if style == "plain":
        return prompt_ids(tokenizer, f"{stem}\n{_ANSWER}" if stem else _ANSWER)
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
    if style == "chat":
        answer = tokenizer.encode(choice, add_special_tokens=False)
    else:
        answer = continuation_ids(tokenizer, _ANSWER, f" {choice}")
    if not answer or not prompt:
        raise ValueError(f"question {name!r}: the choice {choice!r} or its prompt has no tokens")
    ids = np.asarray([*prompt, *answer], np.int32)
    if max_length is not None and len(ids) > max_length:
        raise ValueError(
            f"question {name!r} takes {len(ids)} tokens with the choice {choice!r}, and at most "
            f"{max_length} fit: raise max_length, or leave the question out"
        )
    return Example(ids, np.arange(len(ids)) >= len(prompt))
