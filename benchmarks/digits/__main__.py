"""The defaults of ``jaxkfac train --preset digits``: how they were chosen, and how they race.

Run: python -m benchmarks.digits [--part SECONDS] [--documented]

Each optimizer has eight settings. Each is trained with seed 100 until the error on the validation
images is the target of ``jaxkfac train``, or to the end; chosen is what gets there in the least
processor time, which is that of its quickest epoch times the epochs. What is chosen is trained to
the end with seeds 0, 1 and 2. The test images are those of split 0 for all seeds, and nothing
reads them before a run of these has ended.

With ``--documented`` five seeds of the optimizers as their pages give them are trained instead, to
the target alone, beside AdamW as chosen.

Runs are recorded one by one in results/digits.jsonl, so that the command goes on where it was
stopped, and ends by writing the table, results/digits.md.
"""

import argparse
import functools
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks._record import stamp
from benchmarks.digits._documented import OPTIMIZERS, SEEDS, train_documented
from benchmarks.digits._page import page
from benchmarks.digits._run import train
from benchmarks.digits._settings import CHOOSING, RACING, SETTINGS, chosen
from jaxkfac.jobs.cli._options import Optimizer

RESULTS = Path(__file__).parent.parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", type=float, default=math.inf, help="begin no run after so long")
    parser.add_argument("--documented", action="store_true", help="the defaults, nothing tuned")
    args, began = parser.parse_args(), time.monotonic()
    path = RESULTS / "digits.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def recorded(make: Callable[[], dict[str, Any]], command: str, **asked: Any) -> dict[str, Any]:
        for known in lines:
            if asked == {key: known[key] for key in asked}:
                return known
        if time.monotonic() - began > args.part:
            sys.exit("more runs are to be made: repeat the command")
        lines.append(stamp(command=command, **asked) | make())
        with path.open("a") as file:
            file.write(json.dumps(lines[-1]) + "\n")
        print(*asked.values(), lines[-1]["epochs"][-1:], flush=True)
        return lines[-1]

    def run(name: Optimizer, setting: dict[str, Any], seed: int, *, whole: bool) -> dict[str, Any]:
        make = functools.partial(train, name, setting, seed, whole=whole)
        return recorded(
            make, "python -m benchmarks.digits", optimizer=name, seed=seed, setting=setting
        )

    if args.documented:
        command = "python -m benchmarks.digits --documented"
        for name in OPTIMIZERS:
            for seed in SEEDS:
                make = functools.partial(train_documented, name, seed)
                recorded(make, command, optimizer=name, seed=seed, setting="documented")
    else:
        for name, settings in SETTINGS.items():
            best = chosen([run(name, setting, CHOOSING, whole=False) for setting in settings])
            for seed in RACING:
                run(name, best, seed, whole=True)
    (RESULTS / "digits.md").write_text(page(lines))


if __name__ == "__main__":
    main()
