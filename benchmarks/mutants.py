"""Random one-line mutants of the core, each run against the tests of its room.

Run: python -m benchmarks.mutants [--count 200] [--seed 0] [--again | --check] [--record FILE]

Lines of the core's sources, as they are at a commit, are drawn without replacement, and of each
line one mutant (``_mutations``). A mutant stands in a copy of that commit's tree; the test files
of its room run in turn, those named after the file first, then the quickest, until a test fails.
Files that are known not to execute the line are left out; what survives goes on to the oracles
above. A file may take three times the processor time that it took when it last passed, and 20 s
more: time on the clock depends on the load.

The record is written after every mutant, so that a run goes on where it was stopped; ``why`` in it
is written by hand and kept. ``--again`` makes the changes of the survivors without a ``why`` in the
last commit, as far as it still has their lines, and runs its tests that are new or other ones;
``--check`` runs without any mutant the tests that have killed one.

Each part is there for a reason. ``_mutations`` makes 14 kinds, since most lines have no operator to
change. Forks: an import under the type hook takes 8 s of processor time, and most mutants die in
less. The lines that a test file executes: without them a survivor meets its whole room. Limits of
processor time: a mutant can run for ever, as one of 200 did. A record after each: a run takes
hours. ``--again``: a test that is written for a survivor is seen to kill it.

Neither mutmut (no seed, no sample; its trampolines meet the runtime type hook) nor cosmic-ray (one
command for all mutants, each in a fresh interpreter, limits by the clock) draws and runs so.
"""

import argparse
import collections
import difflib
import hashlib
import io
import json
import random
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from benchmarks._forked_tests import Outcome, preload, run
from benchmarks._mutations import Mutant, mutants

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "benchmarks" / "results" / "mutants.json"
UNKNOWN = 60.0  # seconds for a file that has not passed yet
WORK = Path(tempfile.gettempdir()) / "jaxkfac-mutants"  # copies, compiled programs, unmutated runs

# Room: its sources, the tests of the room, and the oracles that stand above it.
ROOMS = {
    "linalg": ("jaxkfac/linalg/*.py", "jaxkfac/linalg/*_test.py", "jaxkfac/curvature/*_test.py"),
    "kinds": (
        "jaxkfac/kinds/*.py",
        "jaxkfac/kinds/*_test.py jaxkfac/factors/*_test.py jaxkfac/curvature/ekfac/*_test.py",
        "tests/factors_oracle_test.py jaxkfac/interception/*_test.py",
    ),
    "masks": (
        "jaxkfac/interception/_row_masks.py jaxkfac/interception/_propagate.py"
        " jaxkfac/interception/_axes.py jaxkfac/interception/_examples.py",
        "jaxkfac/interception/*_test.py jaxkfac/factors/*_test.py",
        "tests/constant_rows_test.py tests/factors_oracle_test.py",
    ),
    "factors": (
        "jaxkfac/factors/*.py",
        "jaxkfac/factors/*_test.py",
        "tests/factors_oracle_test.py tests/invariants_test.py",
    ),
    "curvature": (
        "jaxkfac/curvature/*.py",
        "jaxkfac/curvature/*_test.py jaxkfac/curvature/ekfac/*_test.py",
        "jaxkfac/optim/*_test.py tests/invariants_test.py",
    ),
    "EKFAC": ("jaxkfac/curvature/ekfac/*.py", "jaxkfac/curvature/ekfac/*_test.py", ""),
    "host": ("jaxkfac/curvature/host/*.py", "jaxkfac/curvature/host/*_test.py", ""),
    "accumulation": (
        "jaxkfac/optim/_multi_steps.py jaxkfac/optim/_accumulators.py jaxkfac/optim/_trees.py",
        "jaxkfac/optim/*_test.py",
        "",
    ),
    "adapters": ("jaxkfac/lslora/*.py", "jaxkfac/lslora/*_test.py", "jaxkfac/lslora/nf4/*_test.py"),
    "NF4": ("jaxkfac/lslora/nf4/*.py", "jaxkfac/lslora/nf4/*_test.py", "tests/nf4_test.py"),
    "planning": ("jaxkfac/planning/*.py", "jaxkfac/planning/*_test.py", ""),
}


def _glob(root: Path, patterns: str) -> list[str]:
    found = [path for pattern in patterns.split() for path in sorted(root.glob(pattern))]
    return [str(path.relative_to(root)) for path in found]


def _sources(root: Path, room: str) -> list[str]:
    return [x for x in _glob(root, ROOMS[room][0]) if not x.endswith(("_test.py", "__init__.py"))]


def drawn(root: Path, count: int, seed: int) -> list[dict[str, Any]]:
    """``count`` lines, one mutant of each: first what is changed, then how."""
    lines: list[tuple[str, str, list[Mutant]]] = []
    for room in ROOMS:
        for file in _sources(root, room):
            by_line = collections.defaultdict(list)
            for mutant in mutants((root / file).read_text()):
                by_line[mutant.line].append(mutant)
            lines += [(room, file, found) for _, found in sorted(by_line.items())]
    generator = random.Random(seed)
    record = []
    for room, file, found in generator.sample(lines, count):
        what = generator.choice(sorted({mutant.what for mutant in found}))
        mutant = generator.choice([mutant for mutant in found if mutant.what == what])
        record.append({"room": room, "file": file, **mutant._asdict()})
    return record


# ---------------------------------------------------------------- one mutant


class Passed:
    """Of every test file that has passed: its processor time, and the lines it executes."""

    def __init__(self, commit: str) -> None:
        self._path = WORK / f"passed-{commit[:12]}.json"
        self._kept = json.loads(self._path.read_text()) if self._path.exists() else {}

    def get(self, tree: Path, file: str) -> dict[str, Any] | None:
        return self._kept.get(self._key(tree, file))

    def note(self, tree: Path, file: str, found: Outcome) -> None:
        self._kept[self._key(tree, file)] = {"seconds": found.seconds, "lines": found.lines}
        self._path.write_text(json.dumps(self._kept))

    def _key(self, tree: Path, file: str) -> str:
        return f"{file} {hashlib.sha256((tree / file).read_bytes()).hexdigest()[:12]}"

    def order(self, tree: Path, file: str) -> float:
        """Seconds, or a guess from the length of a file that has not passed yet."""
        known = self.get(tree, file)
        return known["seconds"] if known else len((tree / file).read_text()) / 500


def tried(
    tree: Path, mutant: dict[str, Any], tests: list[str], imported: Any, passed: Passed
) -> Outcome:
    """Test files until one fails: those known to meet the line, then the unknown."""
    name, anew = Path(mutant["file"]).stem, _among(mutant, imported)
    tests = sorted(tests, key=lambda x: (not Path(x).stem.startswith(name), passed.order(tree, x)))
    known = {x: found for x in tests if (found := passed.get(tree, x))}
    meeting = {x: k["seconds"] for x, k in known.items() if anew or _among(mutant, k["lines"])}
    total = 0.0
    for files in [meeting, *({x: UNKNOWN} for x in tests if x not in known)]:
        if files:
            changed, trace = _changed(tree, mutant), files is not meeting
            found = run(tree, files, changed=changed, anew=anew, trace=trace)
            total += found.seconds
            if found.failed:
                return found._replace(seconds=total)
            if trace and not anew:  # an import adds its own lines
                passed.note(tree, *files, found)
    return Outcome(None, "", total, {})


def _among(mutant: dict[str, Any], lines: dict[str, list[int]]) -> bool:
    first, last = mutant["lines"]
    return any(first <= line <= last for line in lines.get(mutant["file"], ()))


def _changed(tree: Path, mutant: dict[str, Any]) -> tuple[Path, str]:
    path = tree / mutant["file"]
    rows = path.read_text().split("\n")
    assert rows[mutant["line"] - 1] == mutant["before"], f"the copy in {tree} is not the commit's"
    rows[mutant["line"] - 1] = mutant["after"]
    return path, "\n".join(rows)


def moved(mutant: dict[str, Any], before: Path, tree: Path) -> dict[str, Any] | None:
    """The mutant where its line is in another tree, or ``None`` where that has no such line."""
    if not (tree / mutant["file"]).exists():
        return None
    old, new = ((root / mutant["file"]).read_text().split("\n") for root in (before, tree))
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for start, at, size in matcher.get_matching_blocks():
        if start <= mutant["line"] - 1 < start + size:
            by = at - start
            lines = [line + by for line in mutant["lines"]]
            return {**mutant, "line": mutant["line"] + by, "lines": lines}
    return None


def copied(commit: str) -> Path:
    """The commit's tree in a temporary folder."""
    tree = WORK / commit[:12]
    packed = io.BytesIO(subprocess.check_output(["git", "archive", commit], cwd=ROOT))
    with tarfile.open(fileobj=packed) as files:  # over what a run that was stopped has left
        files.extractall(tree, filter="data")
    return tree


def _differs(file: str, tree: Path, before: Path) -> bool:
    """Whether a file is new, or has another text."""
    old = before / file
    return not old.exists() or old.read_bytes() != (tree / file).read_bytes()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", action="store_true", help="survivors against today's tests")
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--check", action="store_true", help="what killed, without a mutant")
    given = parser.parse_args()
    head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
    if given.record.exists():
        record = json.loads(given.record.read_text())
    else:
        record = {"commit": head, "count": given.count, "seed": given.seed}
        record["mutants"] = drawn(copied(head), given.count, given.seed)
    commit = head if given.again else record["commit"]
    before, tree = copied(record["commit"]), copied(commit)
    imported, passed = preload(tree, WORK / "compiled"), Passed(commit)
    if given.check:
        stages = STAGES[2:] if given.again else STAGES[:2]
        killers = [k for x in record["mutants"] if (k := killed_by(x, stages))]
        kills = {re.sub(r"^\w+ in ", "", k) for k in killers}  # a signal, or what has stalled
        found = run(tree, dict.fromkeys(sorted(kills), UNKNOWN)).failed or "all pass"
        record[f"{'tests since ' if given.again else ''}without a mutant"] = found
        print(f"{len(kills)} tests that killed: {found}")
    for stage in () if given.check else ("since",) if given.again else ("beside", "above"):
        for i, mutant in enumerate(record["mutants"], 1):
            done = "beside" not in mutant if given.again else stage in mutant
            if done or killed_by(mutant) or "why" in mutant:
                continue
            _, beside, above = ROOMS[mutant["room"]]
            tests = _glob(tree, {"beside": beside, "above": above}.get(stage, f"{beside} {above}"))
            line = f"{i} {stage}: {mutant['file']}:{mutant['line']} {mutant['what']}"
            there = mutant
            if given.again:
                tests = [x for x in tests if _differs(x, tree, before)]
                there = moved(mutant, before, tree)
            if there is None:
                print(f"{line}: its line is gone", flush=True)
                continue
            found = tried(tree, there, tests, imported, passed)
            mutant[stage] = {"killed_by": found.failed, "said": found.said}
            given.record.write_text(json.dumps(record, indent=1) + "\n")
            print(f"{line}: {found.failed or 'SURVIVED'} ({found.seconds:.0f} s)", flush=True)
    given.record.write_text(json.dumps(record, indent=1) + "\n")
    given.record.with_suffix(".md").write_text(table(record))
    return 0


STAGES = ("beside", "above", "since")


def killed_by(mutant: dict[str, Any], stages: tuple[str, ...] = STAGES) -> str | None:
    """The test that killed it in one of the stages."""
    return next((k for stage in stages if (k := mutant.get(stage, {}).get("killed_by"))), None)


def table(record: dict[str, Any]) -> str:
    """The record for a reader: counts by room, the survivors, then every mutant."""
    tried_ = [x for x in record["mutants"] if "beside" in x]
    alive = [x for x in tried_ if not killed_by(x, STAGES[:2])]
    killed = sum(killed_by(x) is not None for x in tried_)
    lines = [
        f"# One-line mutants of {record['commit'][:12]}, seed {record['seed']}",
        "",
        f"`python -m benchmarks.mutants` has run {len(tried_)} of {len(record['mutants'])}: "
        f"{len(tried_) - len(alive)} were killed by the tests of that commit, and by those added "
        f"since {killed} in all ({killed / len(tried_):.0%}). Without a mutant "
        f"those tests: {record.get('without a mutant', 'not run')}; those that have killed since: "
        f"{record.get('tests since without a mutant', 'not run')}.",
        "",
        "| room | run | killed by its tests | by oracles above | by tests added since | survive |",
        "|---|---|---|---|---|---|",
    ]
    for room in ROOMS:
        here = [x for x in tried_ if x["room"] == room]
        counts = [sum(bool(x.get(s, {}).get("killed_by")) for x in here) for s in STAGES]
        cells = [room, len(here), *counts, len(here) - sum(counts)]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", "## What survived the tests of that commit", ""]
    for mutant in alive:
        since = killed_by(mutant)
        told = f"killed since by `{since}`" if since else mutant.get("why", "not explained yet")
        lines.append(f"- {_shown(mutant)}: {told}")
    lines += ["", "## What was killed", ""]
    lines += [f"- {_shown(x)}: `{killed_by(x)}`" for x in tried_ if x not in alive]
    return "\n".join(lines) + "\n"


def _shown(mutant: dict[str, Any]) -> str:
    before, after = mutant["before"].strip(), mutant["after"].strip()
    return f"`{mutant['file']}:{mutant['line']}` {mutant['what']}: `{before}` → `{after}`"


if __name__ == "__main__":
    sys.exit(main())
