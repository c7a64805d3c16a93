"""What a measurement entered is noted by name; any change but of words and layout is seen."""

import textwrap
import threading

import pytest

pytest.importorskip("torch")

from benchmarks._documents import _sources
from benchmarks._documents._sources import Sources, digest, packed, traced, unpacked
from jaxkfac.memory import parse_bytes

BEFORE = """
LIMIT = 3
OTHER = 4


def kept(x):
    "Words."
    return [y for y in x if y < LIMIT]
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A function that writes a module and returns the digest of its function."""
    (tmp_path / "jaxkfac").mkdir()
    monkeypatch.setattr(_sources, "ROOT", tmp_path)

    def written(text):
        (tmp_path / "jaxkfac" / "_made.py").write_text(textwrap.dedent(text))
        _sources._module.cache_clear()
        _sources._syntax.cache_clear()
        return digest(["jaxkfac._made:kept"])

    yield written
    _sources._module.cache_clear()
    _sources._syntax.cache_clear()


def test_words_layout_place_and_other_constants_do_not_count(project):
    after = BEFORE.replace('"Words."', '"Others, and more."  # why')
    after = "\n\n" + after.replace("OTHER = 4", "OTHER = 5").replace("x if", "x\n    if")
    assert project(after) == project(BEFORE)


@pytest.mark.parametrize(
    ("old", "new"), [("y <", "y <="), ("LIMIT = 3", "LIMIT = 2"), ("def kept", "def lost")]
)
def test_a_changed_line_a_changed_constant_and_a_lost_function_count(project, old, new):
    assert project(BEFORE.replace(old, new)) != project(BEFORE)


def test_what_runs_is_noted_in_every_thread():
    def work():
        inside = threading.Thread(target=parse_bytes, args=("1GB",), kwargs={"name": "x"})
        inside.start()
        inside.join()
        return sorted([3, 1], key=lambda x: -x)

    value, sources = traced(work)
    assert value == [3, 1]
    (name,) = [x for x in sources.functions if x.endswith(":parse_bytes")]
    assert name.startswith("jaxkfac.memory.")
    assert sources.digest == digest(sources.functions)
    assert not [x for x in sources.functions if x.startswith("tests.")]


def test_a_record_keeps_what_was_entered():
    rows = {"a": Sources(("m:f", "m:g", "n:h"), "1"), "b": Sources(("m:f", "n:h"), "2")}
    record = packed(rows)
    assert record["rows"]["a"]["functions"] == "0-2"
    assert record["rows"]["b"]["functions"] == "0 2"
    assert unpacked(record) == rows


def test_rows_are_marked_where_functions_have_changed_or_are_not_recorded():
    known = "jaxkfac.memory:__getattr__"
    rows = {"same": Sources((known,), digest([known])), "other": Sources((known,), "0")}
    said = {"measured": "once", "torch": {"before": 1.0}}
    names = ("same", "other", "old")
    record = {
        "sources": packed(rows),
        "claims": [{"name": name, **said} for name in names] + [{"name": "counted", "torch": {}}],
    }
    expected = {"other": _sources.CHANGED, "old": _sources.NOT_RECORDED}
    assert _sources.source_marks(record) == expected
