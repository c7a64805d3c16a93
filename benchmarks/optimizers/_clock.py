"""Ours as documented, within the CPU seconds in which a tuned peer comes to its best value.

Run: python -m benchmarks.optimizers._clock [--problem NAME ...] [--minutes 30]
     [--json benchmarks/results/clock-cpu.json]

On each problem AdamW, SOAP and Muon take the problem's steps with the setting that the record of
equal steps has chosen, seeds 0 to 5. Then ``jk.kfac(like=like)`` and ``jk.kfe_adam(0.01,
like=like)`` run for as long as the longest of them with the same seed. Time is CPU time of training
steps on one core, without compilation and evaluation. Of a peer the least validation counts, and
when it came; of ours the least until then. Factors are collected at refreshes; ``jk.kfe_adam``
takes the empirical Fisher, and ``jk.kfac`` the problem's. A part of the record is one optimizer on
one problem; parts that are there are not made again.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import benchmarks.optimizers.__main__  # noqa: F401, its XLA flags
from benchmarks._record import shown, stamp, write
from benchmarks.optimizers._equal_steps import best_choice
from benchmarks.optimizers._problem import Problem
from benchmarks.optimizers._record import FOLDER, SEEDS, Record
from benchmarks.optimizers._summary import numbers
from benchmarks.optimizers.methods import METHODS
from benchmarks.optimizers.problems import PROBLEMS

PEERS, OURS = ("adamw", "soap", "muon"), ("kfac", "kfe_adam")
ALL_SEEDS = (0, *SEEDS)


def peer(problem: Problem, data: Any, name: str) -> dict[str, Any]:
    """The best value of each seed, and the CPU seconds until it."""
    setting = best_choice(Record(FOLDER / f"{problem.name}.jsonl").lines, METHODS[name], problem)
    best, seconds = [], []
    for seed in ALL_SEEDS:
        run = METHODS[name].run(problem, data, setting, seed=seed, budget=0.0, steps=problem.steps)
        times, values = numbers({"error": None, **run}, "cpu_s")
        best.append(float(values.min()))
        seconds.append(float(times[values.argmin()]))
    return {"setting": setting, "best": best, "cpu_s": seconds}


def ours(problem: Problem, data: Any, name: str, peers: Mapping[str, Any]) -> dict[str, Any]:
    """For each peer, the best value of each seed within the peer's CPU seconds."""
    setting, within = METHODS[name].documented[0], {peer: [] for peer in peers}
    steps = []
    for i, seed in enumerate(ALL_SEEDS):
        budget = max(part["cpu_s"][i] for part in peers.values())
        run = METHODS[name].run(problem, data, setting, seed=seed, budget=budget)
        times, values = numbers({"error": None, **run}, "cpu_s")
        for peer, part in peers.items():
            within[peer].append(float(values[times <= part["cpu_s"][i]].min()))
        steps.append(run["steps"][-1] / run["cpu_s"][-1])
    return {"setting": setting, "within": within, "steps_per_s": statistics.median(steps)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--problem", nargs="+", choices=tuple(PROBLEMS), default=tuple(PROBLEMS))
    parser.add_argument("--minutes", type=float, default=30, help="begin no part after them")
    parser.add_argument("--core", type=int, help="to run on; by default the last")
    parser.add_argument("--json", type=Path, help="write the record here")
    args = parser.parse_args()
    core = max(os.sched_getaffinity(0)) if args.core is None else args.core
    os.sched_setaffinity(0, {core})
    stop, record = time.monotonic() + 60 * args.minutes, stamp(problems={})
    if args.json is not None and args.json.exists():
        record = json.loads(args.json.read_text())
    for name in args.problem:
        problem, data = PROBLEMS[name], None
        parts = record["problems"].setdefault(name, {})
        for method in (*PEERS, *OURS):
            if method in parts or time.monotonic() > stop:
                continue
            data = problem.data() if data is None else data
            if method in PEERS:
                parts[method] = peer(problem, data, method)
                shown(f"{name} {method}", parts[method])
            else:
                parts[method] = ours(problem, data, method, {x: parts[x] for x in PEERS})
                shown(f"{name} {method}", parts[method])
            write(record, args.json)


if __name__ == "__main__":
    main()
