"""Each branch on a size, a dtype, a device or a count, and a parity or oracle case for each side.

Run: python -m benchmarks.thresholds [--measure [PYTEST WORDS ...]] [--write]

The conditions of ``if``, ``while``, ``match``, conditional expressions, ``where`` and ``cond`` in
the rooms of the mathematics are listed from their syntax. ``--measure`` copies the project, writes
a call around each condition, runs the tests there, and keeps for each side the first test that
took it; results are added to the record, so that the tests may be run in parts. By default it runs
``parity_tests`` and the oracles of ``tests``. ``--write`` writes
``benchmarks/results/thresholds.json`` and ``.md``.
"""

import argparse
import datetime
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks._thresholds import RECORDER, Condition, conditions, instrumented

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks" / "results" / "thresholds.json"
ROOMS = ("factors", "kinds", "linalg", "curvature", "lslora", "optim")
TESTS = ("parity_tests", *(f"tests/{name}oracle_test.py" for name in ("", "factors_")))
COMMAND = "python -m benchmarks.thresholds --measure --write"
Sides = dict[str, dict[str, str]]  # {condition: {side: test}}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--measure", nargs="*", metavar="WORD", help="words of pytest")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    sides, tests = recorded(), ran()
    if arguments.measure is not None:
        words = arguments.measure or TESTS
        sides = merged(sides, measured(words))
        tests = sorted({*tests, *(word for word in words if word.endswith((".py", "tests")))})
    known = {condition.key for condition in listed()}
    sides = {key: found for key, found in sorted(sides.items()) if key in known}
    if arguments.write:
        record = {"command": COMMAND, "date": datetime.date.today().isoformat()}
        record |= {"tests": tests, "sides": sides}
        RECORD.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
        RECORD.with_suffix(".md").write_text(page(sides, tests))
    missing = [condition for condition in listed() if condition.missing(sides)]
    print(f"{len(listed())} conditions; {len(missing)} have a side that no case takes")
    return 0


def files() -> Iterator[Path]:
    """The modules of the rooms, without tests."""
    for room in ROOMS:
        for path in sorted((ROOT / "jaxkfac" / room).rglob("*.py")):
            if not path.name.endswith(("_test.py", "conftest.py")):
                yield path.relative_to(ROOT)


@functools.cache
def listed() -> tuple[Condition, ...]:
    """All conditions, in the order of files and lines."""
    return tuple(x for path in files() for x in conditions(path, (ROOT / path).read_text()))


def recorded() -> Sides:
    """The record; empty before the first."""
    return json.loads(RECORD.read_text())["sides"] if RECORD.exists() else {}


def ran() -> list[str]:
    """The test files that have been run for the record."""
    return json.loads(RECORD.read_text())["tests"] if RECORD.exists() else []


def merged(first: Mapping[str, Mapping[str, str]], second: Sides) -> Sides:
    """Sides of both; the first one's tests stay."""
    return {key: {**second.get(key, {}), **first.get(key, {})} for key in {*first, *second}}


def measured(words: Sequence[str]) -> Sides:
    """Run tests in a copy whose conditions note the sides that they take."""
    with tempfile.TemporaryDirectory() as folder:
        copy, out = Path(folder) / "copy", Path(folder) / "sides.json"
        without = (".git", ".venv*", ".*_cache", "build", "__pycache__", "*.egg-info")
        ignored = shutil.ignore_patterns(*without)
        shutil.copytree(ROOT, copy, ignore=ignored)
        for path in files():
            (copy / path).write_text(instrumented(path, (ROOT / path).read_text()))
        (copy / "jaxkfac" / "_sides.py").write_text(RECORDER)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
        env = {**os.environ, "PYTHONPATH": str(copy), "JAXKFAC_SIDES": str(out)}
        done = subprocess.run(command, cwd=copy, env=env)
        if not out.exists():
            raise RuntimeError(f"pytest ended with {done.returncode} and left no record")
        return json.loads(out.read_text())


def page(sides: Sides, tests: Sequence[str]) -> str:
    """One line for each condition, below its file."""
    every = listed()
    missing = sum(condition.missing(sides) for condition in every)
    lines = [
        "# Branches on sizes, dtypes, devices and counts",
        "",
        f"{len(every)} conditions of {', '.join(ROOMS)}, listed from their syntax by",
        "`python -m benchmarks.thresholds --write`. For each side, the table has the first parity",
        f"or oracle case that took it, or “none”: {missing} conditions have such a side, without",
        "those that raise an error. A traced condition is an array inside a program: both sides",
        "are compiled, and the case is one that built it.",
        "",
        f"Run for it so far: {', '.join(f'`{name}`' for name in tests)}. “none” says nothing of",
        "other tests.",
    ]
    for path in dict.fromkeys(condition.path for condition in every):
        lines += ["", f"## {path}", "", "| function | condition | sides |", "|---|---|---|"]
        for condition in (condition for condition in every if condition.path == path):
            found = sides.get(condition.key, {})
            errors = {"True": "an error"} if condition.refuses else {}
            none = {side: errors.get(side, "none") for side in condition.sides(found)}
            cells = [f"{side}: {found.get(side, none[side])}" for side in none]
            source = condition.source.replace("|", "\\|")
            lines.append(f"| {condition.function} | `{source}` | {'; '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
