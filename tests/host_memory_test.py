import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.exhaustive
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the resident peak is read from /proc"
)
@pytest.mark.parametrize(
    "options", [("1",), ("2",), ("1", "--storage", "bfloat16")], ids=["all", "stagger", "bfloat16"]
)
def test_the_resident_peak_stays_within_the_stated_bound(options):
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1048576", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.host", "--memory", *options]
    out = subprocess.run(
        command, env=environment, cwd=ROOT, check=True, capture_output=True, text=True
    )
    record = json.loads(out.stdout)
    # At least the average and both sets of bases are there, so that something was measured.
    assert record["bound_mib"] / 2 < record["peak_mib"] <= record["bound_mib"], record
