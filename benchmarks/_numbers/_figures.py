"""Figures with a unit in the pages' prose, and what each is linked to.

A figure is a number in front of a unit of bytes, time, share or speed. Code and the pages that are
made from records are left out. Each figure stands in a piece of text that is either made from a
record, number by number, or exempt for a reason that is stated: ``_quoted`` has both.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
MADE_FROM_RECORDS = ("docs/documents.md", "docs/numbers.md")
_UNITS = (
    r"%|×(?!\s*\d)|[KMGT]i?B/s|[KMGT]i?B|kB|bytes?|bits?|TFLOP/s|µs|ms|s|seconds?|min|minutes?|h|hours?|"
    r"days?|times|wins|millihartree|CPU (?:seconds|s|minutes)"
)
_NUMBER = r"(?<![\w.`/-])\d[\d,]*(?:\.\d+)?(?:e-?\d+)?"
_FIGURE = re.compile(rf"{_NUMBER}(?:\s|\u00a0)?(?:{_UNITS})(?![\w-])")
_CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)


class Linked(NamedTuple):
    """A piece of a page whose figures come from a record.

    Attributes:
        page: The file, from the project's root.
        text: The piece, with a format such as ``{:.2f}`` in place of each number.
        record: The file below ``benchmarks/results``.
        values: The numbers of a record; it gets JSON as it is and JSON lines as a list.
    """

    page: str
    text: str
    record: str
    values: Callable[[Any], Sequence[Any]]

    def words(self) -> str:
        """The piece as its record has it."""
        path = ROOT / "benchmarks" / "results" / self.record
        if path.suffix == ".jsonl":
            record = [json.loads(line) for line in path.read_text().splitlines()]
        else:
            record = json.loads(path.read_text())
        return self.text.format(*self.values(record))


class Exempt(NamedTuple):
    """A piece of a page whose figures are in no record.

    Attributes:
        page: The file, from the project's root.
        text: The piece.
        reason: Why, or what holds it instead.
    """

    page: str
    text: str
    reason: str

    def words(self) -> str:
        """The piece."""
        return self.text


def pages() -> list[str]:
    """README and the pages, without those that are made from records."""
    names = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
    return [name for name in names if name not in MADE_FROM_RECORDS]


def prose(page: str) -> str:
    """A page in one line, without its blocks of code and with ``code`` in place of inline code."""
    text = _CODE.sub("`code`", (ROOT / page).read_text())
    return " ".join(text.split())


def figures(text: str) -> Iterator[tuple[int, int]]:
    """Where the figures of a prose stand."""
    for match in _FIGURE.finditer(text):
        yield match.span()


def unlinked(page: str, text: str, pieces: Sequence[Linked | Exempt]) -> list[str]:
    """What is wrong with a page: figures in no piece, and pieces that are not in it."""
    covered: list[tuple[int, int]] = []
    wrong = []
    for piece in (piece for piece in pieces if piece.page == page):
        words = piece.words()
        places = [match.span() for match in re.finditer(re.escape(words), text)]
        if not places:
            wrong.append(f"{page} has no “{words}”")
        covered += places
    for start, end in figures(text):
        if not any(a <= start and end <= b for a, b in covered):
            around = text[max(0, start - 60) : end + 40]
            wrong.append(f"{page}: {text[start:end]} is in no record and not exempt: “{around}”")
    return wrong
