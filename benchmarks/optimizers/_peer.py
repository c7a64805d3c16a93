"""Runs of a peer in an environment of its own, where there is one."""

import json
import os
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
        RuntimeError: it failed; with the last line that it wrote.
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
            lines = [line for line in done.stderr.splitlines() if line.strip()] or [""]
            raise RuntimeError(f"status {done.returncode}: {lines[-1].strip()[:300]}")
        return json.loads(done.stdout.splitlines()[-1])

    return run
