"""Compile every step for an H100, eight of them, or a TPU v5e; no such device is needed.

Run: python -m benchmarks.accelerators --target h100 [--size real] [--dtype float32]
     [--layout "one device"] [--limit SECONDS] [--again]

in an environment that has the target's compiler: ``make accelerators`` makes one for each. A row
that is in the record is not compiled again, unless ``--again``; so a run that was stopped goes on.
With ``--limit`` each row has a process of its own, which may take so many CPU seconds.
"""

import argparse
import fcntl
import importlib.metadata
import json
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.accelerators._table import page

RECORD = Path(__file__).parents[1] / "results" / "accelerators.json"
COMMAND = "make accelerators"
SHARDED = ("gradient", "factors, empirical", "natural gradient", "K-FAC step")
LAYOUTS = ("one device", "data parallel", "fully sharded")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=("h100", "v5e"), required=True)
    parser.add_argument("--size", default="small", help="real or small (default)")
    parser.add_argument("--dtype", default="float32", help="float32 (default) or bfloat16")
    parser.add_argument("--layout", choices=LAYOUTS, default="one device")
    parser.add_argument("--only", default="", help="pattern of the steps")
    parser.add_argument("--limit", type=int, help="CPU seconds of a row")
    parser.add_argument("--again", action="store_true", help="compile what is recorded, too")
    args = parser.parse_args()
    from jaxkfac.planning import TARGETS

    ours = TARGETS[args.target].environment
    if any(os.environ.get(name) != value for name, value in ours.items()):
        # XLA reads them when it is loaded, and it is: begin again.
        os.environ.update(ours)
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.accelerators", *sys.argv[1:]])
    for name in chosen(args):
        place = (args.target, args.layout, args.size, args.dtype, name)
        if "/".join(place) in recorded()["rows"] and not args.again:
            continue
        row = apart(place, args.limit) if args.limit else compiled(place)
        if row is not None:
            keep(place, row)


def chosen(args: argparse.Namespace) -> list[str]:
    """Names of the steps to compile."""
    from benchmarks.accelerators._programs import steps

    names = [name for name in steps() if args.layout == "one device" or name in SHARDED]
    return [name for name in names if re.search(args.only, name)]


def compiled(place: tuple[str, ...]) -> dict[str, Any]:
    """One row, compiled here."""
    from benchmarks.accelerators._compiled import compile_step
    from benchmarks.accelerators._programs import DTYPES, SIZES, Steps, steps

    target, layout, size, dtype, name = place
    fn, args = steps()[name](Steps(SIZES[size], DTYPES[dtype]))
    return compile_step(fn, args, target, layout)


def apart(place: tuple[str, ...], limit: int) -> dict[str, Any] | None:
    """One row in a process of its own; what stopped it where something does."""
    target, layout, size, dtype, name = place
    command = [sys.executable, "-m", "benchmarks.accelerators", "--again", "--target", target]
    command += ["--layout", layout, "--size", size, "--dtype", dtype]
    done = subprocess.run(
        [*command, "--only", f"^{re.escape(name)}$"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (limit, limit)),
        capture_output=True,
        text=True,
    )
    if done.returncode == 0:
        print(done.stdout, end="", flush=True)
        return None  # it has written its row
    if -done.returncode in (signal.SIGXCPU, signal.SIGKILL):
        return {"stopped": f"no result after {limit} CPU s"}
    lines = done.stderr.strip().splitlines()
    error = (line for line in reversed(lines) if re.match(r"[\w.]+(Error|Exception)\b", line))
    return {"stopped": next(error, f"ended with status {done.returncode}")}


def recorded() -> dict[str, Any]:
    """The record so far."""
    return json.loads(RECORD.read_text()) if RECORD.exists() else {"rows": {}}


def keep(place: tuple[str, ...], row: dict[str, Any]) -> None:
    """Put a row into the record, which other processes may be writing, too."""
    with RECORD.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        record = recorded()
        record["command"] = COMMAND
        record.setdefault("versions", {}).update(versions())
        record["rows"]["/".join(place)] = row
        record["rows"] = dict(sorted(record["rows"].items()))
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
        RECORD.with_suffix(".md").write_text(page(record))
    shown = row.get("stopped") or (
        f"temporaries {row['temporaries'] / 2**20:8.1f}  arguments {row['arguments'] / 2**20:8.1f}"
        f"  outputs {row['outputs'] / 2**20:8.1f}  scratch {row['scratch'] / 2**20:6.1f} MiB"
        f"  {row['compile_cpu_s']:6.1f} CPU s  {row['collectives'] or ''}"
    )
    print(f"{'/'.join(place):60s} {shown}", flush=True)


def versions() -> dict[str, str]:
    """Of what decides the figures, as far as it is installed here."""
    out = {}
    for package in (
        "jax",
        "jaxlib",
        "flax",
        "jax-cuda12-plugin",
        "nvidia-cuda-nvcc-cu12",
        "libtpu",
    ):
        try:
            out[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return out


if __name__ == "__main__":
    main()
