"""Every example runs as its first lines say."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


# An example that needs minutes has a mode of seconds.
SHORT = {
    "atoms": ["--system", "hydrogen", "--steps", "60", "--walkers", "128"],
    "fewshot": ["--width", "8", "--n-episode", "40", "--epochs", "2", "--n-test", "20"],
    "poisson": ["--seconds", "1"],
    "finetune_decoder": ["--tiny", "--steps", "30", "--rate", "0.02", "--questions", "20"],
}


# Most of their time is compilation, of which plain kernels take less.
COMPILING = ("atoms", "poisson", "finetune_decoder")


def _by_place(path: Path) -> Any:
    """One example is slow; `make run` runs Poisson's equation, and others are exhaustive."""
    marks = [] if path.stem == "finetune_decoder" else [pytest.mark.exhaustive]
    return pytest.param(path, id=path.stem, marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize("path", [_by_place(path) for path in EXAMPLES])
def test_example_runs_and_learns(path: Path, tmp_path: Path, request: pytest.FixtureRequest):
    if path.stem not in COMPILING:
        request.getfixturevalue("users_kernels")
    command = [sys.executable, path, *SHORT.get(path.stem, [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    if path.stem in SHORT:
        first, last = map(float, re.findall(r"(?:loss|error) (\S+) -> (\S+)", done.stdout)[-1])
        assert last < 0.98 * first, done.stdout
        return
    accuracy = float(done.stdout.split()[-1])
    assert accuracy > 0.94, done.stdout
