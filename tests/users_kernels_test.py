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
]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("users_kernels")
def test_invariants_factors_programs_and_four_bits():
    words = ["-q", "-m", "slow and not exhaustive", "-p", "no:cacheprovider", *TESTS]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
