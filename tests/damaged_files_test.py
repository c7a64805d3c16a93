"""Damaged files of every format end in one sentence with their name, and never end the process."""

import collections
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests._damage import FORMATS, Format, described, outcome

ROOT = Path(__file__).parents[1]
MUTATIONS = 200


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FORMATS)
def test_a_damaged_file_is_refused_in_a_sentence_or_read(name, tmp_path):
    command = [sys.executable, "-m", "tests._damage", name, str(tmp_path), str(MUTATIONS)]
    done = subprocess.run(
        command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=600
    )
    outcomes = [line.partition(" ")[2] for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"mutation {len(outcomes) - 1}: {done.stderr[-3000:]}"
    assert len(outcomes) == MUTATIONS
    counts = collections.Counter(outcomes)
    assert not counts.keys() - {"same", "other", "refused"}, counts
    assert counts["refused"] + counts["other"] > 0, counts  # else what is changed is not read


@pytest.mark.parametrize(
    ("read", "checked", "expected"),
    [
        (lambda folder: 1, True, "same"),
        (lambda folder: 2, True, "silently different"),
        (lambda folder: 2, False, "other"),
        (lambda folder: int("x"), False, "no sentence with the file: ValueError: invalid"),
        (lambda folder: (folder / "y").read_bytes().decode(), False, "no sentence with the file"),
    ],
)
def test_what_became_of_a_file_is_told_apart(tmp_path, read, checked, expected):
    (tmp_path / "y").write_bytes(b"\xff")
    kind = Format("y", lambda folder: None, read, checked)
    same = outcome(Format("y", lambda folder: None, lambda folder: 1), tmp_path, "")
    assert same == "other"
    assert outcome(kind, tmp_path, described(1)).startswith(expected)
