"""The record of the mutants is the draw of its commit, and what survives in it is explained."""

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks.mutants import RECORD, drawn, killed_by

ROOT = Path(__file__).parent.parent
COLUMNS = ("room", "file", "line", "what", "before", "after")


def test_the_recorded_mutants_are_those_drawn_from_their_commit(tmp_path):
    record = json.loads(RECORD.read_text())
    commit = record["commit"]
    known = subprocess.run(["git", "cat-file", "-e", commit], cwd=ROOT, check=False)
    if known.returncode:
        pytest.skip("the commit of the record is not in this copy of the repository")
    tree = subprocess.check_output(["git", "archive", commit, "jaxkfac"], cwd=ROOT)
    subprocess.run(["tar", "-x", "-C", str(tmp_path)], input=tree, check=True)
    expected = [{name: mutant[name] for name in COLUMNS} for mutant in record["mutants"]]
    assert drawn(tmp_path, len(expected), record["seed"]) == expected


def test_nine_of_ten_are_killed_and_every_other_one_is_explained():
    record = json.loads(RECORD.read_text())
    alive = [mutant for mutant in record["mutants"] if not killed_by(mutant)]
    assert len(alive) <= len(record["mutants"]) / 10
    assert all(mutant["why"] for mutant in alive)
