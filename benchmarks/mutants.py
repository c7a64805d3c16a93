"""200 one-line mutants of the core, drawn with seed 0, each run against the tests of its room.

Run: python -m benchmarks.mutants [RECORD]

In a copy of the last commit, until a test fails, those named after the mutant's file first. The
record is written after each mutant, so that a run goes on where it was stopped; it may go on in a
later commit, with the lines that this still has. ``why`` in it is written by hand and kept.

Neither mutmut (no seed, no sample; its trampolines meet the runtime type hook) nor cosmic-ray (one
command for all mutants) draws and runs so.
"""

import itertools
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks._mutations import mutants

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "benchmarks" / "results" / "mutants.json"
LIMIT = 1800.0  # seconds for the tests of a room, which take up to 300
STAGES = ("beside", "above", "since")  # tests of the room at the mutants' commit; later ones
MASKS = [f"interception/_{x}" for x in ("row_masks", "propagate", "axes", "examples")]
ACCUMULATION = [f"optim/_{x}" for x in ("multi_steps", "accumulators", "trees")]
ORACLE = "../tests/factors_oracle"
# Room: its sources and its tests, in the order in which they run.
ROOMS = {
    "linalg": (["linalg/*"], "linalg/* curvature/*"),
    "kinds": (["kinds/*"], f"kinds/* factors/* curvature/ekfac/* {ORACLE} interception/*"),
    "masks": (MASKS, f"interception/* factors/* ../tests/constant_rows {ORACLE}"),
    "factors": (["factors/*"], f"factors/* {ORACLE} ../tests/invariants"),
    "curvature": (["curvature/*"], "curvature/* curvature/ekfac/* optim/* ../tests/invariants"),
    "EKFAC": (["curvature/ekfac/*"], "curvature/ekfac/*"),
    "host": (["curvature/host/*"], "curvature/host/*"),
    "accumulation": (ACCUMULATION, "optim/*"),
    "adapters": (["lslora/*"], "lslora/* lslora/nf4/*"),
    "NF4": (["lslora/nf4/*"], "lslora/nf4/* ../tests/nf4"),
    "planning": (["planning/*"], "planning/*"),
}


def drawn(tree: Path, count: int, seed: int) -> list[dict[str, Any]]:
    """``count`` lines without replacement, one mutant of each: first what is changed, then how."""
    lines = []
    for room, (sources, _) in ROOMS.items():
        for path in (p for x in sources for p in sorted((tree / "jaxkfac").glob(f"{x}.py"))):
            if not path.name.endswith(("_test.py", "__init__.py")):
                by_line = itertools.groupby(mutants(path.read_text()), lambda x: x.line)
                lines += [(room, str(path.relative_to(tree)), list(found)) for _, found in by_line]
    generator, record = random.Random(seed), []
    for room, file, found in generator.sample(lines, count):
        what = generator.choice(sorted({mutant.what for mutant in found}))
        mutant = generator.choice([mutant for mutant in found if mutant.what == what])
        record.append({"room": room, "file": file, **mutant._asdict()})
    return record


def copied(commit: str, folder: str) -> Path:
    """The commit's tree."""
    archive = subprocess.check_output(["git", "archive", commit], cwd=ROOT)
    subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
    return Path(folder)


def failing(tree: Path, room: str, first: str = "/") -> str | None:
    """What fails in the tests of a room, if anything does."""
    patterns = [f"{x}_test.py" for x in ROOMS[room][1].split()]
    files = [str(p) for x in patterns for p in sorted((tree / "jaxkfac").glob(x))]
    files.sort(key=lambda file: not Path(file).name.startswith(first))
    command = [sys.executable, "-m", "pytest", "-xq", "-p", "no:cacheprovider", *files]
    options: Any = {"cwd": tree, "env": {**os.environ, "CI": "true"}, "timeout": LIMIT}
    try:
        done = subprocess.run(command, capture_output=True, text=True, **options)
    except subprocess.TimeoutExpired:
        return f"nothing within {LIMIT:g} s"
    found = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", done.stdout, re.M)
    return found[1] if found else f"pytest ends with {done.returncode}" if done.returncode else None


def killed_by(mutant: dict[str, Any]) -> str | None:
    """The test that killed it, if one did."""
    return next((k for stage in STAGES if (k := mutant.get(stage, {}).get("killed_by"))), None)


def run(file: Path, tree: Path, head: str) -> None:
    """Every mutant of a record that no test has met yet, in a copy of a commit."""
    if not file.exists():
        file.write_text(json.dumps({"commit": head, "seed": 0, "mutants": drawn(tree, 200, 0)}))
    record = json.loads(file.read_text())
    stage, passing = "beside" if head == record["commit"] else "since", set()
    for number, mutant in enumerate(record["mutants"], 1):
        if stage in mutant or "why" in mutant or killed_by(mutant):
            continue
        path, room = tree / mutant["file"], mutant["room"]
        rows = path.read_text().split("\n") if path.exists() else []
        if not (at := [i for i, row in enumerate(rows) if row == mutant["before"]]):
            print(f"{number}: {mutant['file']} no longer has {mutant['before'].strip()}")
            continue
        if room not in passing and (failed := failing(tree, room)):
            sys.exit(f"without a mutant: {failed}")
        passing.add(room)
        line = min(at, key=lambda i: abs(i + 1 - mutant["line"]))
        path.write_text("\n".join([*rows[:line], mutant["after"], *rows[line + 1 :]]))
        mutant[stage] = {"killed_by": failing(tree, room, path.stem)}
        path.write_text("\n".join(rows))
        print(f"{number}: {killed_by(mutant) or 'SURVIVED'}", flush=True)
        file.write_text(json.dumps(record, indent=1) + "\n")
    file.with_suffix(".md").write_text(table(record))


def table(record: dict[str, Any]) -> str:
    """The record for a reader: counts by room, what survives, what was killed."""
    run = [x for x in record["mutants"] if any(stage in x for stage in STAGES)]
    alive = [x for x in run if not killed_by(x)]
    text = f"# One-line mutants of {record['commit'][:12]}, seed {record['seed']}\n\n"
    text += f"{len(run) - len(alive)} of {len(run)} killed. Those that survive, by room: "
    text += ", ".join(f"{r} {sum(x['room'] == r for x in alive)}" for r in ROOMS) + ".\n\n"
    for mutant in [*alive, *(x for x in run if x not in alive)]:
        what = f"`{mutant['before'].strip()}` → `{mutant['after'].strip()}`"
        end = f"killed by `{killed_by(mutant)}`" if killed_by(mutant) else mutant.get("why")
        text += f"- `{mutant['file']}:{mutant['line']}` {mutant['what']}: {what}: {end}\n"
    return text


if __name__ == "__main__":
    head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
    with tempfile.TemporaryDirectory() as folder:
        run(Path(sys.argv[1]) if sys.argv[1:] else RECORD, copied(head, folder), head)
