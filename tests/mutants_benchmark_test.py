"""The records of mutants and faults are the draws of their commits, and survivors are explained."""

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks import faults, mutants
from benchmarks.mutants import AGAIN, RECORD, drawn, killed_by

ROOT = Path(__file__).parent.parent
COLUMNS = ("room", "file", "line", "what", "before", "after")


@pytest.mark.slow
@pytest.mark.parametrize("record", [RECORD, faults.RECORD], ids=lambda record: record.stem)
def test_the_recorded_mutants_are_those_drawn_from_their_commit(tmp_path, record):
    found = json.loads(record.read_text())
    commit = found["commit"]
    known = subprocess.run(["git", "cat-file", "-e", commit], cwd=ROOT, check=False)
    if known.returncode:
        pytest.skip("the commit of the record is not in this copy of the repository")
    tree = subprocess.check_output(["git", "archive", commit, "jaxkfac"], cwd=ROOT)
    subprocess.run(["tar", "-x", "-C", str(tmp_path)], input=tree, check=True)
    expected = [{name: mutant[name] for name in COLUMNS} for mutant in found["mutants"]]
    if record == faults.RECORD:
        assert faults.drawn_faults(tmp_path) == expected and found["seed"] == faults.SEED
    else:
        assert drawn(tmp_path, len(expected), found["seed"]) == expected


def test_nine_of_ten_are_killed_and_every_other_one_is_explained():
    record = json.loads(RECORD.read_text())
    alive = [mutant for mutant in record["mutants"] if not killed_by(mutant)]
    assert len(alive) <= len(record["mutants"]) / 10
    assert all(mutant["why"] for mutant in alive)


def test_the_second_record_has_the_same_200_mutants_in_order():
    first, again = (json.loads(file.read_text())["mutants"] for file in (RECORD, AGAIN))
    for old, new in zip(first, again, strict=True):
        assert new["room"] == old["room"]
        assert ("deleted" in new) == (new["place"] == "drawn anew")
        assert "deleted" in new or new["what"] == old["what"]
        if new["place"] == "same":
            assert [new[x].strip() for x in ("before", "after")] == [
                old[x].strip() for x in ("before", "after")
            ]
    assert len({(x["file"], x["line"], x["after"]) for x in again}) == len(again)


def test_every_named_fault_is_killed_and_every_drawn_one_killed_or_explained():
    record = json.loads(faults.RECORD.read_text())
    named, drawn_ones = record["mutants"][: len(faults.NAMED)], record["mutants"][-faults.DRAWN :]
    assert all(killed_by(fault) for fault in named)
    assert all(killed_by(fault) or fault["why"] for fault in drawn_ones)
    assert len(record["mutants"]) == len(named) + len(drawn_ones)


@pytest.fixture
def three_killed(tmp_path, monkeypatch):
    """A record of an old commit, and a suite in which only the fault of line 3 dies of another
    test than before.
    """
    monkeypatch.chdir(tmp_path)
    lines = ["x = 1", "y = 1", "z = 1"]
    Path("source.py").write_text("\n".join(lines))
    rows = [
        {"room": "all", "file": "source.py", "line": i, "what": "number", "before": line}
        | {"after": line.replace("1", "2"), "beside": {"killed_by": f"test_{line[0]}"}}
        for i, line in enumerate(lines, 1)
    ]
    Path("record.json").write_text(json.dumps({"commit": "old", "mutants": rows}))
    started = []

    def failing(*tests):
        started.append((Path("source.py").read_text(), tests))
        source = started[-1][0]
        if "z = 2" in source:
            return "test_all" if "test_all" in tests else None
        return next((test for test in tests if test.replace("test_", "") + " = 2" in source), None)

    monkeypatch.setattr(mutants, "failing", failing)
    return started


def test_on_a_later_commit_the_killer_is_tried_first_and_then_all_tests(three_killed):
    def run(commit):
        three_killed.clear()
        file = Path("record.json")
        mutants.run(file, commit, tests_of=lambda mutant: ["test_all"], again=True)
        return [x.get("again") for x in json.loads(file.read_text())["mutants"]]

    killers = ["test_x", "test_y", "test_all"]
    assert run("new") == [{"commit": "new", "killed_by": killer} for killer in killers]
    alone = [tests for source, tests in three_killed if "2" in source]
    assert alone == [("test_x",), ("test_y",), ("test_z",), ("test_all",)]
    assert "2" not in Path("source.py").read_text()
    assert run("new") and not three_killed  # the next call has nothing to do


def test_a_killer_that_is_gone_or_fails_by_itself_kills_nothing(three_killed, monkeypatch):
    failing = mutants.failing
    broken = lambda *tests: "test_x" if "test_x" in tests else failing(*tests)
    monkeypatch.setattr(mutants, "failing", broken)
    mutants.run(Path("record.json"), "new", tests_of=lambda mutant: ["test_all"], again=True)
    first, *others = json.loads(Path("record.json").read_text())["mutants"]
    assert killed_by(first) is None and all(map(killed_by, others))

    monkeypatch.setattr(mutants, "failing", failing)  # a later call, whose tests kill it
    mutants.run(Path("record.json"), "newer", tests_of=lambda mutant: ["test_x"], again=True)
    first, *_ = json.loads(Path("record.json").read_text())["mutants"]
    assert first["again"] == {"commit": "newer", "killed_by": "test_x"} and "since" not in first
