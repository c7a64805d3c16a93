"""Runs of a peer in an environment of its own, where there is one."""

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.optimizers._method import Setting
from benchmarks.optimizers._problem import Arrays, Problem

VARIABLE = "KFAC_JAX_PYTHON"  # the Python of an environment with kfac-jax


def in_peer(module: str) -> Callable[..., dict[str, Any]]:
    """Runs of ``benchmarks.optimizers.<module>`` there.

    Raises:
        RuntimeError: it failed; with the line of its error.
    """

    def run(
        problem: Problem, data: Arrays, setting: Setting, *, seed: int, budget: float
    ) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "data.npz")
            np.savez(file, **data)  # pyright: ignore[reportArgumentType]
            command = [os.environ[VARIABLE], "-m", f"benchmarks.optimizers.{module}"]
            command += [problem.name, str(file), json.dumps(dict(setting)), str(seed), str(budget)]
            done = subprocess.run(
                command, capture_output=True, text=True, cwd=Path(__file__).parents[2]
            )
        if done.returncode:
            raise RuntimeError(f"status {done.returncode}: {error_of(done.stderr)}")
        return json.loads(done.stdout.splitlines()[-1])

    return run


def error_of(text: str) -> str:
    """The last line of a traceback that names an error, else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (named or lines)[-1][:300]
