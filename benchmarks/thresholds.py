"""Each branch on a size, a dtype, a device or a count, and a case that takes each of its sides.

Run: python -m benchmarks.thresholds [--measure [PYTEST WORDS ...]] [--write]

The conditions of ``if``, ``while``, ``match``, conditional expressions, ``where`` and ``cond`` in
the rooms of the mathematics are listed from their syntax. ``--measure`` copies the project, writes
a call around each condition, runs the tests there, and keeps for each side the first test that
took it. A parity case or an oracle is kept before a test beside the code, whichever ran first.
Results are added to the record, so that the tests may be run in parts. By default it runs parity,
the oracles and the tests of the rooms. ``--write`` writes ``benchmarks/results/thresholds.json``
and ``.md``.
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks._thresholds import RECORDER, Condition, conditions, instrumented
from benchmarks._thresholds_reasons import REASONS

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks" / "results" / "thresholds.json"
ROOMS = ("factors", "kinds", "linalg", "curvature", "lslora", "optim")
# Tests that compare numbers with another computation of them: PyTorch, another library, or the
# same mathematics written out densely in float64.
ORACLES = (
    "parity_tests",
    *(
        f"tests/{name}_test.py"
        for name in (
            *("oracle", "factors_oracle", "coupling_oracle", "curvlinops", "convolution"),
            *("constant_rows", "tied_weights", "several_outputs", "several_readings", "reduce"),
            *("gathered_experts", "ragged_experts", "marked_losses", "coupled_examples", "origin"),
            *("computed_weights", "fisher_types", "ekfac", "nf4", "adapter_directions"),
            *("quadratic_penalty", "complex_parameters", "invariants"),
        )
    ),
)
TESTS = (*ORACLES, *(f"jaxkfac/{room}" for room in ROOMS))
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
        tests = sorted({*tests, *(word for word in words if (ROOT / word).exists())})
    known = {condition.key for condition in listed()}
    sides = {key: found for key, found in sorted(sides.items()) if key in known}
    if arguments.write:
        record = {"command": COMMAND, "date": datetime.date.today().isoformat()}
        record |= {"tests": tests, "sides": sides}
        RECORD.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
        RECORD.with_suffix(".md").write_text(page(sides, tests))
    print(" ".join(counts(sides)))
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


def is_oracle(test: str) -> bool:
    """Whether a test is a parity case or an oracle."""
    return test.startswith(ORACLES)


def merged(first: Sides, second: Sides) -> Sides:
    """Sides of both. An oracle goes before another test, and the first one's tests stay else."""
    both: Sides = {}
    for key in {*first, *second}:
        both[key] = {**second.get(key, {}), **first.get(key, {})}
        for side, test in second.get(key, {}).items():
            if is_oracle(test) and not is_oracle(both[key][side]):
                both[key][side] = test
    return both


def measured(words: Sequence[str]) -> Sides:
    """Run tests in a copy whose conditions note the sides that they take."""
    with tempfile.TemporaryDirectory() as folder:
        copy, out = Path(folder) / "copy", Path(folder) / "sides"
        without = (".git", ".venv*", ".*_cache", "build", "__pycache__", "*.egg-info")
        ignored = shutil.ignore_patterns(*without)
        shutil.copytree(ROOT, copy, ignore=ignored)
        for path in files():
            (copy / path).write_text(instrumented(path, (ROOT / path).read_text()))
        (copy / "jaxkfac" / "_sides.py").write_text(RECORDER)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
        env = {**os.environ, "PYTHONPATH": str(copy), "JAXKFAC_SIDES": str(out)}
        done = subprocess.run(command, cwd=copy, env=env)
        processes = sorted(Path(folder).glob(f"{out.name}.*"))
        if not processes:
            raise RuntimeError(f"pytest ended with {done.returncode} and left no record")
        return functools.reduce(merged, (json.loads(file.read_text()) for file in processes))


def counts(sides: Sides) -> list[str]:
    """How many conditions have a side without an oracle, without a test and without a reason."""
    oracles = {
        key: {side: test for side, test in found.items() if is_oracle(test)}
        for key, found in sides.items()
    }
    every = listed()
    without_oracle = [x for x in every if x.missing(oracles)]
    without_test = [x for x in every if x.missing(sides)]
    without_reason = [x for x in without_oracle if x.key not in REASONS]
    return [
        f"{len(every)} conditions;",
        f"{len(without_oracle)} have a side that neither parity nor an oracle takes,",
        f"{len(without_test)} one that no test takes,",
        f"{len(without_reason)} of them without a reason here.",
    ]


def page(sides: Sides, tests: Iterable[str]) -> str:
    """One line for each condition, below its file."""
    every = listed()
    lines = [
        "# Branches on sizes, dtypes, devices and counts",
        "",
        f"Conditions of {', '.join(ROOMS)}, listed from their syntax by",
        "`python -m benchmarks.thresholds --write`. For each side, the table has the first parity",
        "or oracle case that took it; else, in italics, the first test beside the code; else",
        "“none”. A side that only raises an error counts as an error, and is for tests of errors.",
        "Where no oracle takes a side, the last column says why that is enough. A traced condition",
        "is an array inside a program: both sides are compiled, and the case is one that built it.",
        "",
        *counts(sides),
        "",
        f"Run for it: {', '.join(f'`{name}`' for name in tests)}. “none” says nothing of other",
        "tests.",
    ]
    for path in dict.fromkeys(condition.path for condition in every):
        lines += ["", f"## {path}", ""]
        lines += [
            "| function | condition | sides | without an oracle because |",
            "|---|---|---|---|",
        ]
        for condition in (condition for condition in every if condition.path == path):
            found = sides.get(condition.key, {})
            cells = [f"{side}: {_cell(condition, found, side)}" for side in condition.sides(found)]
            row = condition.function, f"`{condition.source}`", "; ".join(cells)
            reason = REASONS.get(condition.key, "")
            lines.append("| " + " | ".join(x.replace("|", "\\|") for x in (*row, reason)) + " |")
    return "\n".join(lines) + "\n"


def _cell(condition: Condition, found: Mapping[str, str], side: str) -> str:
    if condition.refuses and side == "True":
        return "an error"
    if side not in found:
        return "none"
    return found[side] if is_oracle(found[side]) else f"*{found[side]}*"


if __name__ == "__main__":
    sys.exit(main())
