"""The record of compiled programs: rows by place, each with what it was compiled from."""

import datetime
import fcntl
import importlib.metadata
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.accelerators._table import page

RECORD = Path(__file__).parents[1] / "results" / "accelerators.json"
BEGUN = "cut off"  # a row's reason while it is compiled, and after where nothing came back
_COMPILERS = {
    "h100": ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12"),
    "v5e": ("jax", "jaxlib", "libtpu"),
}

Place = tuple[str, str, str, str, str]  # target, layout, size, dtype, step


def recorded() -> dict[str, Any]:
    """The record so far."""
    return json.loads(RECORD.read_text()) if RECORD.exists() else {"rows": {}}


def is_current(place: Place, program: str) -> bool:
    """Whether the record has this very program, compiled by these very compilers."""
    row = recorded()["rows"].get("/".join(place), {})
    same = row.get("program") == program and row.get("versions") == versions(place[0])
    return same and row.get("stopped") != BEGUN


def keep(place: Place, row: Mapping[str, Any], program: str) -> None:
    """Put a row into the record, which other processes may be writing, too."""
    source = {"program": program, "versions": versions(place[0]), "commit": commit()}
    source["date"] = datetime.date.today().isoformat()
    with RECORD.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        rows = recorded()["rows"] | {"/".join(place): {**row, **source}}
        record = {"command": "make accelerators", "rows": dict(sorted(rows.items()))}
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
        RECORD.with_suffix(".md").write_text(page(record))
    if row.get("stopped") != BEGUN:
        print(f"{'/'.join(place):60s} {shown(row)}", flush=True)


def shown(row: Mapping[str, Any]) -> str:
    """A row in a line."""
    if "stopped" in row:
        return row["stopped"]
    names = ("temporaries", "arguments", "outputs", "scratch")
    sizes = "  ".join(f"{name} {row[name] / 2**20:8.1f}" for name in names)
    return f"{sizes} MiB  {row['compile_cpu_s']:6.1f} CPU s  {row['collectives'] or ''}"


def versions(target: str) -> dict[str, str]:
    """Of what compiles for a target."""
    return {name: importlib.metadata.version(name) for name in _COMPILERS[target]}


def commit() -> str:
    """Of this code; with a plus where files differ from it."""
    ask = ["git", "-C", str(Path(__file__).parent)]
    name = subprocess.run([*ask, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    changed = [*ask, "diff", "--quiet", "HEAD", "--", ":/jaxkfac"]
    return name.stdout.strip() + "+" * (subprocess.run(changed).returncode == 1)
