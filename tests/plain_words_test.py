"""`make lint` names turns of phrase that readers had to read twice."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LINT = runpy.run_path(str(ROOT / ".ci" / "plain_words.py"))

READ_TWICE = {
    "Of": "One line.\nOf layers behind a semicolon it is the gradient.",
    "the same of": "Another page.\nIt is the same\nof one output.",
    "is one process's": "It is there.\nAn adaptive kfac is one process's.",
    "as it is has": "It is added.\nWhat is added as it is has that G by right.",
    "so does": "An error names it,\nand so does the table.",
    "is owed to": "It says\nwhich texts an answer is owed to.",
    "asks nobody": "It is fast:\nwith none it asks nobody.",
}


def test_every_pattern_has_an_example():
    assert len(READ_TWICE) == len(LINT["TURNS"])


@pytest.mark.parametrize("words", READ_TWICE)
def test_a_turn_of_phrase_is_named_with_its_line(words):
    ((line, found, remedy),) = LINT["turns"](READ_TWICE[words])
    assert (line, found) == (2, words) and remedy


def test_code_is_not_prose():
    assert not list(LINT["turns"]("```python\n# Of a layer\n```\nSay `Of a` or ``so does``."))


def test_pages_docstrings_and_help_are_read(tmp_path):
    for path in ("docs/a.md", "jaxkfac/jobs/_options.py", "jaxkfac/_other_test.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        text = "Fine.\nOf a layer."
        (tmp_path / path).write_text(f'x: int\n"""{text}"""\n' if path.endswith("py") else text)
    (tmp_path / "README.md").touch()
    places = [line.split(": ")[0] for line in LINT["complaints"](tmp_path)]
    assert places == ["docs/a.md:2", "jaxkfac/jobs/_options.py:3"]


@pytest.mark.slow
def test_what_users_read_has_none_of_them():
    assert list(LINT["complaints"]()) == []
