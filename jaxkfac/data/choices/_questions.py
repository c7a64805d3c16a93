"""Questions with choices, and their file format."""

from pathlib import Path
from typing import Any, NamedTuple

from jaxkfac.data.text._read import read_lines


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
    """The questions of a JSONL file, in its order.

    Args:
        path: Lines as :func:`parse_question` knows them.

    Returns:
        At least one question.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is no JSON or no question, or its answer key is none of its labels;
            named with file and line.

    References:
        T. Mihaylov, P. Clark, T. Khot, A. Sabharwal, Can a Suit of Armor Conduct Electricity? A
        New Dataset for Open Book Question Answering, 2018.
    """
    return read_lines(Path(path), parse_question)


def parse_question(plain: Any) -> Question:
    """A question from what JSON gives.

    Args:
        plain: ``{"id", "question": {"stem", "choices": [{"text", "label"}, ...]}, "answerKey"}``.

    Raises:
        ValueError: a key is missing or of another type, fewer than two choices, two with one
            label, or an answer key that is none of the labels.

    Example:
        >>> parse_question({"id": "1", "answerKey": "B", "question": {"stem": "Fe is", "choices": [
        ...     {"text": "lead", "label": "A"}, {"text": "iron", "label": "B"}]}}).answer
        1
    """
    try:
        stem, choices = plain["question"]["stem"], plain["question"]["choices"]
        texts = tuple(choice["text"] for choice in choices)
        labels = tuple(choice["label"] for choice in choices)
        name, key = str(plain["id"]), plain["answerKey"]
    except (KeyError, TypeError) as error:
        raise ValueError(
            'expected {"id", "question": {"stem", "choices": [{"text", "label"}, ...]}, '
            f'"answerKey"}}; {error!r}'
        ) from error
    if not all(isinstance(x, str) and x for x in (stem, *texts, *labels)):
        raise ValueError(f"question {name!r}: stem, texts and labels must be non-empty strings")
    if len(texts) < 2 or len(set(labels)) < len(labels):
        raise ValueError(f"question {name!r}: expected two or more labels, got {list(labels)}")
    if key not in labels:
        raise ValueError(
            f"question {name!r}: the answer key {key!r} is none of its labels {list(labels)}"
        )
    return Question(name, stem, texts, labels, labels.index(key))
