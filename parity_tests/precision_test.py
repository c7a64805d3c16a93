"""What a case sets is set on both sides while it runs, and as it was afterwards."""

import contextlib
import subprocess
import sys
from pathlib import Path

import jax
import pytest
import torch

from parity_tests.precision import precision, tf32_switches


def _now() -> list:
    return [getattr(owner, attribute) for owner, attribute, _, _ in tf32_switches()]


@pytest.mark.parametrize("tf32", [False, True])
def test_tf32_is_switched_on_both_sides_and_back(tf32: bool):
    before = _now()
    with contextlib.suppress(KeyError), precision("float32", "cpu", tf32=tf32):
        assert _now() == [on if tf32 else off for _, _, off, on in tf32_switches()]
        assert jax.config.jax_default_matmul_precision == ("tensorfloat32" if tf32 else "highest")
        raise KeyError("a case that fails")
    assert _now() == before


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="PyTorch before 2.9"
)
def test_what_the_older_interface_had_set_is_there_again():
    """In a process of its own, which no other test finds changed."""
    code = (
        "import torch\n"
        "from parity_tests.precision import precision\n"
        "matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn\n"
        "for allowed in (True, False):\n"
        "    matmul.allow_tf32 = cudnn.allow_tf32 = allowed\n"
        "    for tf32 in (True, False):\n"
        "        with precision('float32', 'cpu', tf32=tf32):\n"
        "            pass\n"
        "        assert matmul.allow_tf32 is allowed and cudnn.allow_tf32 is allowed\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=Path(__file__).parent.parent,
    )
    assert run.returncode == 0, run.stderr
