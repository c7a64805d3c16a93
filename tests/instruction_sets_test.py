"""Tests that compare libraries or bits pass with the instructions of older processors too.

Three libraries choose kernels by what the processor can do, and sum in another order with each:
PyTorch, XLA and the OpenBLAS of NumPy. Each is told by a variable of its own to take those of an
older one. A processor that has no AVX2 itself can run the first case only.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SETTINGS = {
    "SSE4.2": ("default", "SSE4_2", "Nehalem"),
    "AVX2": ("avx2", "AVX2", "Haswell"),
}
COMPARISONS = [
    "jaxkfac/curvature/host/_service_test.py",
    "jaxkfac/linalg",
    "parity_tests",
    "tests/curvlinops_test.py",
    "tests/decoder_test.py",
    "tests/encoder_decoder_test.py",
    "tests/nf4_test.py",
    "torch_ref",
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SETTINGS)
def test_comparisons_hold_with_the_instructions_of_older_processors(name, tmp_path):
    aten, xla, openblas = SETTINGS[name]
    flags = re.sub(r"--xla_cpu_max_isa=\S+", "", os.environ["XLA_FLAGS"])
    variables = {
        "ATEN_CPU_CAPABILITY": aten,
        "XLA_FLAGS": f"{flags} --xla_cpu_max_isa={xla}",
        "OPENBLAS_CORETYPE": openblas,
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),  # of programs for this instruction set alone
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *COMPARISONS],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:]
