"""Numbers of the suite, whose kernels are plain ones, with the kernels that users have."""

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = [
    "tests/invariants_test.py",
    "tests/factors_oracle_test.py",
    "jaxkfac/interception/_rewrite_test.py",
    "jaxkfac/lslora/nf4/_quantize_test.py",
    "jaxkfac/lslora/nf4/_programs_test.py",
    "jaxkfac/models/decoder/_generate_test.py",
]


@pytest.mark.slow
@pytest.mark.usefixtures("users_kernels")
def test_factors_programs_four_bits_and_answers():
    words = ["-q", "-m", "slow and not exhaustive", "-p", "no:cacheprovider", *TESTS]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
