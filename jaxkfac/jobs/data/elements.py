"""The chemical elements, embedded: facts to teach a language model, and questions about them."""

import csv
from collections.abc import Callable, Sequence
from importlib import resources
from typing import NamedTuple

import numpy as np

from jaxkfac.files import check_sha256
from jaxkfac.jobs.data.choices._questions import Question
from jaxkfac.jobs.data.text._encode import Chat, Message

__all__ = [
    "Element",
    "element_questions",
    "element_records",
]

ELEMENTS_SHA256 = "300f6826084160244df36b746737e2325de9146a86e65100e9e34495dae38903"
"""Digest of the embedded file."""


class Element(NamedTuple):
    """A row of the periodic table.

    Attributes:
        number: Atomic number.
        symbol: One or two letters.
        name: Name in IUPAC's spelling, lower case.
        group: 1 to 18; ``None`` for lanthanides and actinides.
        period: 1 to 7.
        state: At room temperature: ``"solid"``, ``"liquid"``, ``"gas"`` or ``"unknown"``.
        category: Such as ``"noble gas"``; ``"unknown"`` for the heaviest ones.
    """

    number: int
    symbol: str
    name: str
    group: int | None
    period: int
    state: str
    category: str


def load_elements() -> tuple[Element, ...]:
    """All 118 elements, in the order of their numbers.

    Returns:
        118 rows; ``jaxkfac/jobs/data/elements.txt`` describes the sources.

    Raises:
        ValueError: the embedded file does not have the digest ``ELEMENTS_SHA256``.

    Example:
        >>> load_elements()[25].symbol
        'Fe'
    """
    content = resources.files("jaxkfac.jobs.data").joinpath("elements.csv").read_bytes()
    check_sha256(content, ELEMENTS_SHA256, "jaxkfac/jobs/data/elements.csv")
    return tuple(_element(row) for row in csv.DictReader(content.decode("ascii").splitlines()))


def _element(row: dict[str, str]) -> Element:
    return Element(
        number=int(row["number"]),
        symbol=row["symbol"],
        name=row["name"],
        group=int(row["group"]) if row["group"] else None,
        period=int(row["period"]),
        state=row["state"],
        category=row["category"],
    )


# ---------------- facts about elements to learn, and test questions with different wording


# (question, answer); None if it is not known.
_Fact = Callable[[Element], tuple[str, str] | None]

_TAUGHT: tuple[_Fact, ...] = (
    lambda e: (f"What is the symbol of {e.name}?", e.symbol),
    lambda e: (f"Give the chemical symbol for {e.name}.", e.symbol),
    lambda e: (f"Which element has the symbol {e.symbol}?", e.name.capitalize()),
    lambda e: (f"What is the atomic number of {e.name}?", str(e.number)),
    lambda e: (f"Which element has the atomic number {e.number}?", e.name.capitalize()),
    lambda e: _known(f"What kind of element is {e.name}?", e.category),
    lambda e: _known(f"Is {e.name} a solid, a liquid or a gas?", e.state),
    lambda e: (f"Which period does {e.name} belong to?", str(e.period)),
    lambda e: (f"Which group does {e.name} belong to?", str(e.group)) if e.group else None,
)

# (stem, source of the choices)
_ASKED: tuple[tuple[Callable[[Element], str], Callable[[Element], str]], ...] = (
    (lambda e: f"On a periodic table, {e.name} is written as", lambda e: e.symbol),
    (lambda e: f"The letters {e.symbol} stand for the element", lambda e: e.name.capitalize()),
    (lambda e: f"The number of protons in an atom of {e.name} is", lambda e: str(e.number)),
    (lambda e: f"Chemists would say that {e.name} is an example of", lambda e: e.category),
)
_LABELS = "ABCD"


def element_records(*, system: str = "") -> list[Chat]:
    """Short questions and answers about every element: about a thousand conversations.

    Args:
        system: System message; if it is empty there is none, and the chat template of the model
            may insert its own.

    Returns:
        Records of all questions that have an answer, element by element.

    Example:
        >>> element_records()[0].messages[1]
        Message(role='assistant', content='H', more={}, learnt=True)
    """
    first = (Message("system", system),) if system else ()
    facts = (fact(element) for element in load_elements() for fact in _TAUGHT)
    return [
        Chat((*first, Message("user", fact[0]), Message("assistant", fact[1])))
        for fact in facts
        if fact is not None
    ]


def element_questions(count: int = 60, *, seed: int = 0) -> list[Question]:
    """Multiple-choice questions about the same facts, with a wording that no record uses.

    The choices are symbols, names or numbers of four elements, with similar spelling or number
    if possible, or four categories. The wording and form are held out, not the facts.

    Args:
        count: Number of questions, at most ``456``.
        seed: Seed of the selection and order of questions.

    Returns:
        Questions with the labels A to D.

    Raises:
        ValueError: ``count`` is out of range.

    Example:
        >>> question = element_questions(1)[0]
        >>> len(question.choices), question.choices[question.answer] in question.choices
        (4, True)
    """
    elements = load_elements()
    pool = [
        (kind, element)
        for kind, (_, answer) in enumerate(_ASKED)
        for element in elements
        if answer(element) != "unknown"
    ]
    if not 1 <= count <= len(pool):
        raise ValueError(f"count must lie in 1 .. {len(pool)} (questions), not {count}")
    order = np.random.Generator(np.random.Philox(seed)).permutation(len(pool))[:count]
    return [_question(*pool[int(i)], elements, seed=(seed, int(i))) for i in order]


def _question(
    kind: int, element: Element, elements: Sequence[Element], *, seed: tuple[int, int]
) -> Question:
    stem, answer = _ASKED[kind]
    rng = np.random.Generator(np.random.Philox(key=np.array(seed, np.uint64)))
    right = answer(element)
    others = sorted({answer(e) for e in elements} - {right, "unknown"})
    wrong = sorted(rng.permutation(others), key=lambda other: _distance(right, str(other)))[:3]
    choices = [str(x) for x in rng.permutation([right, *wrong])]
    return Question(
        id=f"{element.symbol}-{kind}",
        stem=stem(element),
        choices=tuple(choices),
        labels=tuple(_LABELS),
        answer=choices.index(right),
    )


def _distance(right: str, other: str) -> int:
    """Close numbers, and words with the same first letter, are harder to tell apart."""
    if right.isdigit():
        return abs(int(right) - int(other))
    return int(right[0] != other[0])


def _known(question: str, answer: str) -> tuple[str, str] | None:
    return None if answer == "unknown" else (question, answer)
