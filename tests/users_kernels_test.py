"""What the suite finds with plain kernels holds of those that users have."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.usefixtures("users_kernels")
def test_a_program_of_each_family_of_the_zoo():
    words = ["tests/zoo/zoo_test.py", "-k", "value_gradient", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
