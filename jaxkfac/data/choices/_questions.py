"""Questions with choices, and their file format."""

import string
from pathlib import Path
from typing import Any, NamedTuple

from jaxkfac.data.readers import read_rows


class Question(NamedTuple):
    """A question with several answers, one of them right.

    Attributes:
        id: What the file calls it.
        stem: The question, or the sentence that an answer ends.
        choices: Texts of the answers.
        labels: Their labels, such as A to D.
        answer: Index of the right one.
    """

    id: str
    stem: str
    choices: tuple[str, ...]
    labels: tuple[str, ...]
    answer: int

    def to_plain(self) -> dict[str, Any]:
        """The object that OpenBookQA's files hold."""
        choices = [{"text": t, "label": n} for t, n in zip(self.choices, self.labels, strict=True)]
        return {
            "id": self.id,
            "question": {"stem": self.stem, "choices": choices},
            "answerKey": self.labels[self.answer],
        }


def read_questions(path: Path | str) -> list[Question]:
    """The questions of a file, in its order.

    Args:
        path: Rows as :func:`parse_question` knows them, in any format of
            :mod:`jaxkfac.data.readers`.

    Returns:
        At least one question.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a row is no JSON or no question, or its answer key is none of its labels;
            named with file and number.

    References:
        T. Mihaylov, P. Clark, T. Khot, A. Sabharwal, Can a Suit of Armor Conduct Electricity? A
        New Dataset for Open Book Question Answering, 2018.
    """
    return read_rows(path, parse_question)


def parse_question(plain: Any) -> Question:
    """A question from what JSON gives.

    Args:
        plain: In OpenBookQA's own form ``{"id", "question": {"stem", "choices": [{"text",
            "label"}, ...]}, "answerKey"}``; in that of the datasets library ``{"question_stem" or
            "question", "choices": {"text": [...], "label": [...]}, "answerKey"}``; or
            ``{"question", "choices": [...], "answer": index}`` as in MMLU. Without an ``"id"``
            the question stands for it.

    Raises:
        ValueError: a key is missing or of another type, fewer than two choices, two with one
            label, or an answer key that is none of the labels.

    Example:
        >>> parse_question({"id": "1", "answerKey": "B", "question_stem": "Fe is",
        ...                 "choices": {"text": ["lead", "iron"], "label": ["A", "B"]}}).answer
        1
    """
    try:
        stem, texts, labels, key = _parts(plain)
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(
            'expected {"id", "question": {"stem", "choices": [{"text", "label"}, ...]}, '
            '"answerKey"}, or {"question_stem", "choices": {"text": [...], "label": [...]}, '
            f'"answerKey"}}; {error!r}'
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
        known = dict(enumerate(labels))  # datasets without answers have -1
        return stem, tuple(choices), labels, known.get(plain["answer"], plain["answer"])
    texts = tuple(choice["text"] for choice in choices)
    return stem, texts, tuple(choice["label"] for choice in choices), plain["answerKey"]
