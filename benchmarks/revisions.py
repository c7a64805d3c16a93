"""Costs of factors and adapters at another revision and here, in turns.

Run: python -m benchmarks.revisions 3523f53 [--rounds 3] [--json FILE]
     python -m benchmarks.revisions 3523f53 --bits

Each round runs ``benchmarks.factors`` and ``benchmarks.adapters`` of the revision and of this tree,
in turns the one or the other first, each in a process of its own and with this environment.
Compared are costs that are ratios already, to the gradient and to the base model's step, so that a
machine's speed cancels; ``over`` is the geometric mean over rounds of this tree's ratio over the
revision's. ``--bits`` measures nothing: it compares digests of what both trees compute.
"""

import argparse
import io
import json
import math
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from benchmarks._record import shown, stamp, write

HERE = Path(__file__).parent.parent
COMMANDS = {
    "factors": ["--pairs", "11"],
    "adapters": ["--pairs", "31", "--sizes", "1024"],
}
RATIOS = ("time_ratio", "processor_over_base")  # of a program's row; the other figures are left out


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("revision", help="that git knows")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bits", action="store_true", help="compare digests of results instead")
    parser.add_argument("--json", type=Path, help="write the record here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder) / "revision"
        checked_out(arguments.revision, there)
        if arguments.bits:
            before, now = (digests(tree) for tree in (there, HERE))
            for name in now:
                print(f"{name}: {'equal' if before[name] == now[name] else 'DIFFERENT'}")
            return int(before != now)
        rounds = []
        for turn in range(arguments.rounds):
            order = (there, HERE) if turn % 2 == 0 else (HERE, there)
            found = {tree: measured(tree, Path(folder)) for tree in order}
            rounds.append((found[there], found[HERE]))
    command = f"python -m benchmarks.revisions {arguments.revision} --rounds {arguments.rounds}"
    record = stamp(command=command, revision=arguments.revision, rounds=arguments.rounds)
    for name in rounds[0][0].keys() & rounds[0][1].keys():
        before, now = (mean([turn[i][name] for turn in rounds]) for i in (0, 1))
        record[name] = {"before": before, "now": now, "over": now / before}
    for name in sorted(name for name, value in record.items() if isinstance(value, dict)):
        shown(name, record[name])
    write(record, arguments.json)
    return 0


def mean(ratios: list[float]) -> float:
    """The geometric one."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def checked_out(revision: str, folder: Path) -> None:
    """The revision's files, without history."""
    git = ["git", "-C", str(HERE), "archive", "--format=tar", revision]
    files = subprocess.run(git, stdout=subprocess.PIPE, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(files)) as archive:
        archive.extractall(folder, filter="data")


def digests(tree: Path) -> dict[str, str]:
    """What this tree's ``benchmarks._bits`` prints with the library of ``tree``."""
    environment = os.environ | {"PYTHONPATH": str(tree)}
    # -P: otherwise the script's folder leads the path, and benchmarks/numbers.py is `numbers`.
    command = [sys.executable, "-P", str(HERE / "benchmarks" / "_bits.py")]
    done = subprocess.run(command, cwd=tree, env=environment, check=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout)


def measured(tree: Path, folder: Path) -> dict[str, float]:
    """Every ratio that a tree's two benchmarks print into their JSON."""
    found: dict[str, float] = {}
    environment = os.environ | {"PYTHONPATH": str(tree)}
    for name, options in COMMANDS.items():
        path = folder / f"{name}.json"
        command = [sys.executable, "-m", f"benchmarks.{name}", *options, "--json", str(path)]
        subprocess.run(command, cwd=tree, env=environment, check=True, stdout=subprocess.DEVNULL)
        found |= {f"{name}, {key}": value for key, value in ratios(json.loads(path.read_text()))}
    return found


def ratios(record: Any, path: str = "") -> list[tuple[str, float]]:
    """Every figure of a record under a name that is a ratio's."""
    if not isinstance(record, dict):
        return []
    if "torch" in path or "peft" in path:  # peers
        return []
    here = [(path, record[name]) for name in RATIOS if name in record]
    return here + [x for k, v in record.items() for x in ratios(v, f"{path} {k}".strip())]


if __name__ == "__main__":
    sys.exit(main())
