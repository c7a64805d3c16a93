"""Influence beside its peers, each in an environment and in processes of its own.

``python -m benchmarks.uses --kronfluence ENV/bin/python --json FILE``. Every job reads the same
weights and data, and says how long its stages took, compiling included; the parent sees the peak
of its memory. In float64 on small problems the results are compared number by number, in float32
the jobs are timed. A peer is one file of ``benchmarks/_uses``.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks._record import shown, stamp, write

JOBS = Path(__file__).parent / "_uses"
OURS = [sys.executable, "-m", "benchmarks._uses.influence"]
TOLERANCE = 1e-9


class Problem(NamedTuple):
    """A model and its data.

    Attributes:
        kind: ``"perceptron"`` or ``"transformer"``.
        width: Of its layers.
        examples: To score.
        queries: To score them for.
        batch_size: Examples at a time.
        depth: Blocks.
        length: Tokens of a row.
        vocabulary: Tokens there are.
    """

    kind: str
    width: int
    examples: int
    queries: int
    batch_size: int
    depth: int = 2
    length: int = 16
    vocabulary: int = 24
    heads: int = 2

    def arrays(self, dtype: str) -> dict[str, np.ndarray]:
        """Weights by name, ``(in, out)``, and data."""
        rng, n = np.random.default_rng(0), self.examples + self.queries
        found: dict[str, Any] = {}

        def dense(name: str, rows: int, columns: int, *, bias: bool = True) -> None:
            found[f"{name}.w"] = rng.normal(size=(rows, columns)) / rows**0.5
            if bias:
                found[f"{name}.b"] = 0.1 * rng.normal(size=columns)

        if self.kind == "perceptron":
            sizes = (self.width // 2, self.width, self.width, 10)
            for i, sides in enumerate(zip(sizes[:-1], sizes[1:], strict=True)):
                dense(f"layers.{i}", *sides)
            inputs, targets = rng.normal(size=(n, sizes[0])), rng.integers(0, 10, n)
        else:
            width = self.width
            found["table"] = rng.normal(size=(self.vocabulary, width))
            found["places"] = 0.5 * rng.normal(size=(self.length, width))
            for i in range(self.depth):
                dense(f"blocks.{i}.qkv", width, 3 * width)
                dense(f"blocks.{i}.out", width, width)
                dense(f"blocks.{i}.up", width, 4 * width)
                dense(f"blocks.{i}.down", 4 * width, width)
            dense("head", width, self.vocabulary, bias=False)
            ids = rng.integers(0, self.vocabulary, (n, self.length + 1))
            inputs, targets = ids[:, :-1], ids[:, 1:]
        found |= {"inputs": inputs[: self.examples], "targets": targets[: self.examples]}
        found |= {"q_inputs": inputs[self.examples :], "q_targets": targets[self.examples :]}
        return {k: np.asarray(v, dtype if v.dtype.kind == "f" else None) for k, v in found.items()}


EQUAL = {
    "perceptron": Problem("perceptron", 16, 200, 3, 50),
    "transformer": Problem("transformer", 8, 64, 3, 16, length=6, vocabulary=11),
}
TIMED = {
    "perceptron": Problem("perceptron", 256, 2000, 50, 100),
    "transformer": Problem("transformer", 128, 2000, 20, 25, depth=4, length=64, vocabulary=512,
                           heads=4),
}  # fmt: skip


def job(command: list[str], problem: Problem, dtype: str, **more: Any) -> tuple[Any, Any]:
    """What one process says of a problem, and the arrays that it found."""
    with tempfile.TemporaryDirectory() as folder:
        files = [str(Path(folder, name)) for name in ("problem.npz", "found.npz")]
        settings = problem._asdict() | {"dtype": dtype} | more
        np.savez(files[0], settings=json.dumps(settings), **problem.arrays(dtype))
        process = subprocess.Popen([*command, *files], stdout=subprocess.PIPE, text=True)
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
    """The largest relative difference of each kind of result."""
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


def beside_kronfluence(python: Path, names: list[str]) -> dict[str, Any]:
    """Equality in float64, then time and memory in float32."""
    peer = [str(python), str(JOBS / "kronfluence_influence.py")]
    record: dict[str, Any] = {"equal": {}, "timed": {}}
    for name in names:
        (_, found), (_, expected) = (
            job(command, EQUAL[name], "float64", keep=True) for command in (OURS, peer)
        )
        record["equal"][name] = worst = difference(found, expected)
        shown(f"{name}, relative difference", worst)
        if max(worst.values()) > TOLERANCE:
            raise SystemExit(f"{name}: {worst} is more than {TOLERANCE}")
    for name in names:
        ours, theirs = (job(c, TIMED[name], "float32", keep=False)[0] for c in (OURS, peer))
        totals = {
            who: sum(cpu for _, cpu in said["seconds"].values())
            for who, said in (("ours", ours), ("theirs", theirs))
        }
        ratios = {
            "cpu": totals["ours"] / totals["theirs"],
            "peak": ours["peak_bytes"] / theirs["peak_bytes"],
        }
        record["timed"][name] = {"ours": ours, "kronfluence": theirs, "ratios": ratios}
        shown(f"{name}, ours over theirs", ratios)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kronfluence", type=Path, help="the Python of an environment with it")
    parser.add_argument("--problems", nargs="*", default=list(EQUAL), choices=list(EQUAL))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    problems = {name: TIMED[name]._asdict() for name in arguments.problems}
    record = stamp(problems=problems)
    if arguments.kronfluence is not None:
        record["kronfluence"] = beside_kronfluence(arguments.kronfluence, arguments.problems)
    write(record, arguments.json)


if __name__ == "__main__":
    main()
