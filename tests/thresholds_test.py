"""Branches are found by what they test, and a copy that notes its sides computes the same."""

import json
import os
import sys
import textwrap
from pathlib import Path

import pytest

from benchmarks import thresholds
from benchmarks._thresholds import RECORDER, conditions, instrumented
from benchmarks._thresholds_reasons import REASONS

PATH = Path("jaxkfac/_made.py")
TEXT = textwrap.dedent(
    """
    from __future__ import annotations


    class Kept:
        def take(self, x, name):
            if name == "word":
                return 0
            if len(x) > 2:
                raise ValueError("long")
            match len(x):
                case 1:
                    return "one"
                case _:
                    return [y for y in x if y.size] if x[0].ndim else name is None


    def last(x):
        if len(x) > 2:
            x = x[1:]
        if len(x) > 2:
            return 3
        return jnp.where(x.shape[0] > 1, 1, 2)
    """
)


def test_conditions_on_sizes_are_listed_and_others_are_not():
    found = conditions(PATH, TEXT)
    assert [(x.function, x.source, x.form) for x in found] == [
        ("Kept.take", "len(x) > 2", "if"),
        ("Kept.take", "len(x)", "match"),
        ("Kept.take", "x[0].ndim", "if"),
        ("Kept.take", "y.size", "if"),
        ("last", "len(x) > 2", "if"),
        ("last", "len(x) > 2", "if"),
        ("last", "x.shape[0] > 1", "call"),
    ]
    assert len({x.key for x in found}) == len(found)
    assert [x.key for x in conditions(PATH, "\n\n" + TEXT)] == [x.key for x in found]
    assert [x.refuses for x in found] == [True, *[False] * 6]


def test_a_copy_notes_the_sides_that_it_takes_and_returns_the_same(tmp_path, monkeypatch):
    out = tmp_path / "sides.json"
    monkeypatch.setenv("JAXKFAC_SIDES", str(out))
    recorder: dict = {}
    monkeypatch.setattr("atexit.register", lambda function: function)
    exec(RECORDER, recorder)
    text = instrumented(PATH, TEXT).replace("from jaxkfac import _sides as _the_sides", "")

    class Sides:
        side, note = staticmethod(recorder["side"]), staticmethod(recorder["note"])

    class Where:
        where = staticmethod(lambda test, a, b: a if test else b)

    class Rows(list):
        shape = (2,)

    made: dict = {"_the_sides": Sides, "jnp": Where}
    exec(text, made)
    assert made["Kept"]().take([1], "x") == "one"
    assert made["last"](Rows([1, 2])) == 1
    recorder["write"]()
    sides = json.loads(Path(f"{out}.{os.getpid()}").read_text())
    assert set(sides[f"{PATH}:Kept.take: len(x)"]) == {"case 1"}
    assert set(sides[f"{PATH}:Kept.take: len(x) > 2"]) == {"False"}
    assert set(sides[f"{PATH}:last: x.shape[0] > 1"]) == {"True"}
    (test,) = sides[f"{PATH}:last: len(x) > 2"]["False"]
    assert test.startswith("tests/thresholds_test.py::")
    (refused, *others) = conditions(PATH, TEXT)
    assert not refused.missing(sides) and all(x.missing(sides) for x in others)


def test_parity_goes_before_an_oracle_and_an_oracle_before_other_tests():
    kinds = ("parity_tests/a_test.py::test_f", "tests/oracle_test.py::test_f")
    kinds += (
        "jaxkfac/linalg/spectral/_eigh_test.py::test_f",
        "jaxkfac/linalg/spectral/_eigh_test.py::test_f_named",
    )
    assert [thresholds.rank(test) for test in kinds] == [0, 1, 2, 3]
    assert thresholds.rank("jaxkfac/curvature/host/_state_test.py::test_f") == 3
    for i, better in enumerate(kinds):
        for worse in kinds[i:]:
            for pair in ((better, worse), (worse, better)):
                first, second = ({"a": {"True": test, test: "x"}} for test in pair)
                found = thresholds.merged(first, second)
                assert found == {"a": {"True": better, better: "x", worse: "x"}}
    other = "parity_tests/b_test.py::test_f"
    assert (
        thresholds.merged({"a": {"True": other}}, {"a": {"True": kinds[0]}})["a"]["True"] == other
    )


@pytest.mark.slow
def test_a_reason_stands_only_where_a_condition_has_a_side_without_an_oracle():
    sides = thresholds.recorded()
    oracles = {
        key: {side: test for side, test in found.items() if thresholds.is_oracle(test)}
        for key, found in sides.items()
    }
    needed = {x.key for x in thresholds.listed() if x.missing(oracles)}
    assert not set(REASONS) - needed
    assert all(reason.endswith(".") and "|" not in reason for reason in REASONS.values())


def test_every_condition_is_in_the_record():
    """`python -m benchmarks.thresholds --write` lists a new one, with no case as yet."""
    text = thresholds.RECORD.with_suffix(".md").read_text()
    assert text == thresholds.page(thresholds.recorded(), thresholds.ran()), (
        "python -m benchmarks.thresholds --write"
    )


def test_words_choose_what_is_written(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["thresholds"])
    assert thresholds.main() == 0
    assert "without a reason here" in capsys.readouterr().out
