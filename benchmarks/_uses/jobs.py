"""One process for each job, and what its results are beside another's."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._uses.problems import Problem

PEERS = Path(__file__).parent / "peers"
TOLERANCE = 1e-9


def ours(name: str) -> list[str]:
    """The command of a job in this environment."""
    return [sys.executable, "-m", f"benchmarks._uses.{name}"]


def theirs(python: Path, name: str) -> list[str]:
    """The command of a peer's job, in its own environment."""
    return [str(python), str(PEERS / f"{name}.py")]


def job(
    command: list[str],
    problem: Problem,
    dtype: str,
    *,
    arrays: dict[str, np.ndarray] | None = None,
    environment: Mapping[str, str] | None = None,
    **more: Any,
) -> tuple[Any, Any]:
    """What one process says of a problem, and the arrays that it found.

    Args:
        command: Of the job.
        problem: Its sizes.
        dtype: Of its arrays.
        arrays: Weights and data in place of the problem's own.
        environment: Variables beside this process's own.
        more: Settings.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = [str(Path(folder, name)) for name in ("problem.npz", "found.npz")]
        settings = problem._asdict() | {"dtype": dtype} | more
        given: Any = problem.arrays(dtype) if arrays is None else arrays
        np.savez(files[0], settings=json.dumps(settings), **given)
        process = subprocess.Popen(
            [*command, *files],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | dict(environment or {}),
        )
        assert process.stdout is not None
        said = process.stdout.read().splitlines()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{' '.join(command)} has ended with {process.returncode}")
        record = json.loads(said[-1])
        record |= {"cpu_seconds": used.ru_utime + used.ru_stime, "peak_bytes": used.ru_maxrss << 10}
        return record, dict(np.load(files[1]))


def difference(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """The largest relative difference of each kind of result.

    Raises:
        SystemExit: one has a result that the other lacks.
    """
    worst: dict[str, float] = {}
    if found.keys() != expected.keys():
        raise SystemExit(f"results differ in {sorted(found.keys() ^ expected.keys())}")
    for name, x in found.items():
        kind, y = name.split("/")[0], expected[name]
        if kind == "lambda" and x.shape != y.shape:
            x = x.T
        gap = float(np.abs(x - y).max() / np.abs(y).max())
        worst[kind] = max(worst.get(kind, 0.0), gap)
    return worst


def ratios(one: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """Processor time of each stage and of all, and the peak, as parts of the other's."""
    totals = [{stage: cpu for stage, (_, cpu) in said["seconds"].items()} for said in (one, other)]
    found = {stage: cpu / totals[1][stage] for stage, cpu in totals[0].items()}
    found["cpu"] = sum(totals[0].values()) / sum(totals[1].values())
    found["wall"] = _wall(one) / _wall(other)
    found["peak"] = one["peak_bytes"] / other["peak_bytes"]
    return found


def _wall(said: dict[str, Any]) -> float:
    return sum(wall for wall, _ in said["seconds"].values())
