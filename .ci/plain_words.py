"""Turns of phrase that readers had to read twice, in what users read; each is named with its line.

python .ci/plain_words.py

It reads the README, the pages of docs, and every docstring of the library: those of its options are
the help texts.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
# A turn of phrase, and what to write instead.
TURNS = {
    r"\bOf (?=[a-z])": "begin with the subject",
    r"\bthe same of\b": "say what is alike: like X, for Y",
    r"\bis one process's\b": "say how several processes differ from one",
    r"\bas it is has\b": "say what is not changed",
    r"\bso does\b": "repeat the verb",
    r"\b(?:is|are|was|were) owed to\b": "say what influences what",
    r"\basks nobody\b": "say what is skipped",
}
_PATTERNS = {re.compile(turn.replace(" ", r"\s+")): remedy for turn, remedy in TURNS.items()}
_CODE = re.compile(r"^```.*?^```|``[^`]*``|`[^`]*`", re.MULTILINE | re.DOTALL)


def turns(text: str) -> Iterator[tuple[int, str, str]]:
    """``(line, words, remedy)`` of each turn of phrase in a text; code is not prose."""
    prose = _CODE.sub(lambda code: re.sub(r"[^\n]", " ", code.group()), text)
    for pattern, remedy in _PATTERNS.items():
        for match in pattern.finditer(prose):
            yield prose.count("\n", 0, match.start()) + 1, " ".join(match.group().split()), remedy


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """``(line before, text)`` of each string that stands alone: docstrings and those of fields."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(ast.Constant(str(text))):
                yield node.lineno - 1, text


def complaints(root: Path = ROOT) -> Iterator[str]:
    """A line for each turn of phrase in what users read."""
    for path in (root / "README.md", *sorted((root / "docs").rglob("*.md"))):
        for line, words, remedy in turns(path.read_text()):
            yield f"{path.relative_to(root)}:{line}: {words!r}: {remedy}"
    for path in sorted((root / "jaxkfac").rglob("*.py")):
        if path.stem.endswith("_test"):
            continue
        for before, text in docstrings(path.read_text()):
            for line, words, remedy in turns(text):
                yield f"{path.relative_to(root)}:{before + line}: {words!r}: {remedy}"


if __name__ == "__main__":
    found = list(complaints())
    print(*found, sep="\n", file=sys.stderr)
    sys.exit(bool(found))
