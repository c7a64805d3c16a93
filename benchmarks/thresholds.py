"""Each branch on a size, a dtype, a device or a count, and a case that takes each of its sides.

Run: python -m benchmarks.thresholds [--measure [PYTEST WORDS ...]] [--write]

The conditions of ``if``, ``while``, ``match``, conditional expressions, ``where`` and ``cond`` in
the rooms of the mathematics are listed from their syntax. ``--measure`` copies the project, writes
a call around each condition, runs the tests there, and keeps for each side the first test that
took it: a parity case, else an oracle, else any test. Results are added to the record, so that the
tests may be run in parts, and Ctrl-C ends a part early. By default it runs parity, the oracles and
the tests of the rooms. ``--write`` writes ``benchmarks/results/thresholds.json`` and
``.md``.
"""

import argparse
import contextlib
import datetime
import functools
import json
import os
import re
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
ROOMS = ("blocks", "factors", "kinds", "linalg", "curvature", "lslora", "optim")
BLOCKS = ("uses/_damped_gradients.py", "uses/_rotated_blocks.py")  # arithmetic of one block
# What compares numbers with another computation of them, the best first: PyTorch; the same
# mathematics written out densely in float64, across rooms; and beside the code.
PARITY = ("parity_tests/",)
ORACLES = tuple(
    f"tests/{name}_test.py"
    for name in (
        *("oracle", "factors_oracle", "coupling_oracle", "curvlinops", "convolution", "reduce"),
        *("constant_rows", "tied_weights", "several_outputs", "several_readings", "origin", "nf4"),
        *("gathered_experts", "ragged_experts", "marked_losses", "coupled_examples", "ekfac"),
        *("computed_weights", "fisher_types", "adapter_directions", "quadratic_penalty"),
        *("complex_parameters", "invariants", "norm_blocks", "shard_map_around", "explicit_mesh"),
        *("influence", "laplace", "gradient_store"),
    )
)
BESIDE = tuple(
    f"jaxkfac/{room}/_{name}_test.py"
    for room, names in {
        "linalg": "chunks gram packed sums triangle",
        "linalg/spectral": "eigh inverse kronecker orthogonal_iteration rcond",
        "kinds": "squares",
        "factors": "budgeted convolution_programs example_sums explicit_net features fisher "
        "likelihoods packed_factors patches subsample turns wide_sides",
        "blocks": "average long_sum",
        "curvature": "apply by_slice divided eigenbases eigendecompose in_place inverses "
        "orientations",
        "curvature/capacity": "metrics order",
        "curvature/ekfac": "by_example correct isolated two_sided_kind_from_outside",
        "curvature/host": "average refresh service",
        "curvature/operators": "estimates exact exact_options kronecker operator solve spectrum",
        "lslora": "attach bank branch diagnose fourier fused merge nonlinearity programs stacks",
        "lslora/nf4": "programs quantize",
        "optim": "accumulators adaptation kfac kfe_adam multi_steps overflow packed_state "
        "preconditioner refresh scale_by_bases stacks turns",
    }.items()
    for name in names.split()
)
# Tests of these files that compare words, bytes or the order of work, by their names.
WORDS = (
    r"::test_\w*(refus|named|bad_|out_of_range|_bytes|_memory|_says|_said|json"
    r"|waits|let_go|transferred|donated|dropped|in_flight|room_is)"
)
TESTS = ("parity_tests", *ORACLES, *(f"jaxkfac/{room}" for room in ROOMS))
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
        measurement, noted = measured(words)
        sides = merged(sides, measurement)
        tests = sorted({*tests, *(x for x in words if any(test.startswith(x) for test in noted))})
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
    library = ROOT / "jaxkfac"
    paths = [path for room in ROOMS for path in sorted((library / room).rglob("*.py"))]
    for path in (*paths, *(library / name for name in BLOCKS)):
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


def rank(test: str) -> int:
    """0 for a parity case, 1 and 2 for an oracle across rooms and beside the code, 3 for others."""
    if test.startswith(BESIDE) and re.search(WORDS, test):
        return 3
    kinds = (PARITY, ORACLES, BESIDE)
    return next((i for i, kind in enumerate(kinds) if test.startswith(kind)), 3)


def is_oracle(test: str) -> bool:
    """Whether a test is a parity case or an oracle."""
    return rank(test) < 3


def merged(first: Sides, second: Sides) -> Sides:
    """Sides of both, each with its best test; the first one's before an equally good one."""
    both: Sides = {}
    for key in {*first, *second}:
        one, two = first.get(key, {}), second.get(key, {})
        both[key] = {
            side: min((x[side] for x in (one, two) if side in x), key=rank)
            for side in {**one, **two}
        }
    return both


def measured(words: Sequence[str]) -> tuple[Sides, set[str]]:
    """Run tests in a copy whose conditions note the sides that they take.

    Returns:
        The sides, and the tests that took any: those that an early end left out are not among them.
    """
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
        process = subprocess.Popen(command, cwd=copy, env=env)
        while process.poll() is None:
            with contextlib.suppress(KeyboardInterrupt):  # pytest ends by it, too, with a record
                process.wait()
        processes = sorted(Path(folder).glob(f"{out.name}.*"))
        if not processes:
            raise RuntimeError(f"pytest ended with {process.returncode} and left no record")
        every = [json.loads(file.read_text()) for file in processes]
        noted = {
            x for found in every for sides in found.values() for xs in sides.values() for x in xs
        }
        return functools.reduce(merged, map(_best, every)), noted


def _best(noted: Mapping[str, Mapping[str, Iterable[str]]]) -> Sides:
    """The best test for each side, of those that a process has noted."""
    return {
        key: {side: min(tests, key=rank) for side, tests in sides.items()}
        for key, sides in noted.items()
    }


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
        "case that took it, else the first oracle, else, in italics, the first other test, else",
        "“none”. An oracle is a test that compares numbers with the same mathematics written out.",
        "A side that only raises an error counts as an error, and is for tests of errors. Where no",
        "oracle takes a side, the last column says why. A traced condition is an array inside a",
        "program: both sides are compiled, and the case is one that built it.",
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
