"""Compile every step for an H100, eight of them, or a TPU v5e; no such device is needed.

Run: python -m benchmarks.accelerators --target h100 [--size real] [--dtype float32]
     [--layout "one device"] [--only PATTERN] [--limit SECONDS] [--again]

in an environment that has the target's compiler: ``make accelerators`` makes one for each. A
step is lowered, and compiled where the record does not have this very program from these very
compilers; so a run that was stopped goes on, and a change recompiles what it changed. With
``--limit`` each step has a process of its own, which may take so many CPU seconds.
"""

import argparse
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.accelerators._record import BEGUN, Place, is_current, keep, recorded

SIZES = ("real", "small", "others")
LAYOUTS = ("one device", "data parallel", "fully sharded")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=("h100", "v5e"), required=True)
    parser.add_argument("--size", choices=SIZES, default="small", help="others: no decoders")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--layout", choices=LAYOUTS, default="one device")
    parser.add_argument("--only", default="", help="pattern of the steps")
    parser.add_argument("--limit", type=int, help="CPU seconds of a step")
    parser.add_argument("--again", action="store_true", help="compile what is recorded, too")
    args = parser.parse_args()
    from jaxkfac.planning import TARGETS

    ours = TARGETS[args.target].environment
    if any(os.environ.get(name) != value for name, value in ours.items()):
        # XLA reads them when it is loaded, and it is: begin again.
        os.environ.update(ours)
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.accelerators", *sys.argv[1:]])
    from benchmarks.accelerators._steps import steps_of

    steps = steps_of(args.size, args.dtype, args.layout)
    for name in steps:
        if re.search(args.only, name):
            place = (args.target, args.layout, args.size, args.dtype, name)
            if args.limit:
                apart(place, args.limit, again=args.again)
            else:
                compile_into_record(place, steps[name], again=args.again)


def compile_into_record(place: Place, step: Callable[[], Any], *, again: bool) -> None:
    """Compile one step here, unless the record has it; what stops the compiler is recorded."""
    from benchmarks.accelerators._compiled import compiled_step, fingerprint, lowered_step

    target, layout, *_ = place
    fn, args, *donated = step()
    lowered, seconds = lowered_step(fn, args, donated[0] if donated else (), target, layout)
    program = fingerprint(lowered, target)
    if is_current(place, program) and not again:
        return
    keep(place, {"stopped": BEGUN}, program)
    try:
        row = {"trace_cpu_s": round(seconds, 2), **compiled_step(lowered)}
    except Exception as error:  # any: a row that does not compile says so, and the run goes on
        row = {"stopped": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
    keep(place, row, program)


def apart(place: Place, limit: int, *, again: bool) -> None:
    """One step in a process of its own; the record says what stopped it where something did."""
    target, layout, size, dtype, name = place
    command = [sys.executable, "-m", "benchmarks.accelerators", "--target", target]
    command += ["--layout", layout, "--size", size, "--dtype", dtype] + ["--again"] * again
    done = subprocess.run(
        [*command, "--only", f"^{re.escape(name)}$"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (limit, limit)),
        stderr=subprocess.PIPE,
        text=True,
    )
    row = recorded()["rows"].get("/".join(place), {})
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        keep(place, {"stopped": f"no result after {limit} CPU s"}, row.get("program", ""))
    elif done.returncode:
        sys.stderr.write(done.stderr)
        last = done.stderr.strip().rpartition("\n")[2][:200]
        keep(place, {"stopped": f"ended with status {done.returncode}: {last}"}, "")


if __name__ == "__main__":
    main()
