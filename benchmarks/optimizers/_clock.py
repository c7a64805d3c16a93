"""Ours as documented, within the CPU seconds in which a tuned peer comes to its best value.

Run: python -m benchmarks.optimizers._clock [--problem NAME ...] [--minutes 30]
     [--equal-time NAME ...] [--json benchmarks/results/clock-cpu.json]
     python -m benchmarks.optimizers._clock --figure

On each problem AdamW, SOAP and Muon take the problem's steps with the setting that the record of
equal steps has chosen, seeds 0 to 5. Then ``jk.kfac(like=like)`` and ``jk.kfe_adam(0.01,
like=like)`` run as long as the longest of the peers with the same seed, and at least the same
steps, unless ``--within`` is given. Time is CPU time of training steps on one core, without
compilation and evaluation. Of a peer the least validation counts, and when it came; of ours the
least until then, and the one after the problem's steps. Factors are collected at refreshes;
``jk.kfe_adam`` takes the empirical Fisher, and ``jk.kfac`` the problem's. With ``--equal-time``, a
problem that has a budget of CPU seconds is also run for as long with each optimizer, peers with the
setting that the record of equal time has chosen. A part of the record is one optimizer on one
problem; parts that are there are not made again.
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
from benchmarks.optimizers._record import FOLDER, SEEDS, Record, chosen
from benchmarks.optimizers._summary import at, numbers
from benchmarks.optimizers.methods import METHODS
from benchmarks.optimizers.problems import PROBLEMS
from jaxkfac.plot import FIGURE_STYLE

RESULTS = Path(__file__).parents[1] / "results"
PEERS, OURS = ("adamw", "soap", "muon"), ("kfac", "kfe_adam")
ALL_SEEDS = (0, *SEEDS)


def peer(problem: Problem, data: Any, name: str) -> dict[str, Any]:
    """The best value of each seed, the CPU seconds until it, and the value after the steps."""
    setting = best_choice(Record(FOLDER / f"{problem.name}.jsonl").lines, METHODS[name], problem)
    best, seconds, ends = [], [], []
    for seed in ALL_SEEDS:
        run = METHODS[name].run(problem, data, setting, seed=seed, budget=0.0, steps=problem.steps)
        line = {"error": None, **run}
        times, values = numbers(line, "cpu_s")
        best.append(float(values.min()))
        seconds.append(float(times[values.argmin()]))
        ends.append(at(line, "steps", problem.steps))
    return {"setting": setting, "best": best, "cpu_s": seconds, "at_steps": ends}


def ours(
    problem: Problem, data: Any, name: str, peers: Mapping[str, Any], *, steps: int
) -> dict[str, Any]:
    """For each peer, the best value of each seed within the peer's CPU seconds; and the value after
    the problem's steps.
    """
    setting, within = METHODS[name].documented[0], {peer: [] for peer in peers}
    speeds, ends = [], []
    for i, seed in enumerate(ALL_SEEDS):
        budget = max(part["cpu_s"][i] for part in peers.values())
        run = METHODS[name].run(problem, data, setting, seed=seed, budget=budget, steps=steps)
        line = {"error": None, **run}
        times, values = numbers(line, "cpu_s")
        ends.append(at(line, "steps", problem.steps))
        for peer, part in peers.items():
            within[peer].append(float(values[times <= part["cpu_s"][i]].min()))
        speeds.append(run["steps"][-1] / run["cpu_s"][-1])
    speed = statistics.median(speeds)
    return {"setting": setting, "within": within, "at_steps": ends, "steps_per_s": speed}


def equal_time(problem: Problem, data: Any, name: str) -> dict[str, Any]:
    """The value of each seed after the problem's CPU seconds."""
    method = METHODS[name]
    lines = Record(FOLDER / f"{problem.name}.jsonl").lines
    setting = method.documented[0] if name in OURS else chosen(lines, method, problem)
    runs = [
        method.run(problem, data, setting, seed=seed, budget=problem.budget) for seed in ALL_SEEDS
    ]
    ends = [at({"error": None, **run}, "cpu_s", problem.budget) for run in runs]
    return {"setting": setting, "cpu_s": problem.budget, "values": ends}


def panel(axis: Any, record: dict[str, Any]) -> None:
    """For each problem our value over each peer's, on a logarithmic axis; the least over AdamW's
    first.
    """
    from benchmarks._numbers import clock_ratios

    titles = {"adamw": ("AdamW", "o"), "soap": ("SOAP", "s"), "muon": ("Muon", "^")}
    ratios = clock_ratios(record)
    names = [name for name, _, _ in sorted(ratios["adamw"], key=lambda row: -row[2])]
    for peer, found in ratios.items():
        title, marker = titles[peer]
        rows = [names.index(name) for name, _, _ in found]
        values = [ratio for _, _, ratio in found]
        axis.plot(values, rows, marker, label=f"{title}, tuned", alpha=0.8)
    axis.axvline(1, color="black", lw=1, ls="--")
    axis.set_yticks(range(len(names)), names)
    axis.set(xscale="log", xlabel="our value over the peer's\n(left of 1, ours is better)")
    axis.legend()


def draw(record: dict[str, Any], path: Path) -> None:
    """The panel as a figure."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(FIGURE_STYLE):
        figure = Figure(figsize=(4.8, 3.6), layout="constrained")
        panel(figure.subplots(), record)
        # Without a date, the same numbers give the same bytes.
        figure.savefig(path, format="svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--problem", nargs="+", choices=tuple(PROBLEMS), default=tuple(PROBLEMS))
    parser.add_argument("--equal-time", nargs="+", choices=tuple(PROBLEMS), default=())
    parser.add_argument("--within", action="store_true", help="ours run no longer than the peers")
    parser.add_argument("--minutes", type=float, default=30, help="begin no part after them")
    parser.add_argument("--core", type=int, help="to run on; by default the last")
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--figure", action="store_true", help="draw the record, without runs")
    args = parser.parse_args()
    if args.figure:
        draw(json.loads((RESULTS / "clock-cpu.json").read_text()), RESULTS / "clock.svg")
        return
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
                of_peers = {x: parts[x] for x in PEERS}
                steps = 0 if args.within else problem.steps
                parts[method] = ours(problem, data, method, of_peers, steps=steps)
                shown(f"{name} {method}", parts[method])
            write(record, args.json)
    for name in args.equal_time:
        problem, data = PROBLEMS[name], None
        parts = record.setdefault("equal_time", {}).setdefault(name, {})
        for method in ("muon", "kfe_adam", "adamw", "soap", "kfac"):
            if method in parts or time.monotonic() > stop:
                continue
            data = problem.data() if data is None else data
            parts[method] = equal_time(problem, data, method)
            shown(f"{name} {method}, {problem.budget:g} s", parts[method])
            write(record, args.json)


if __name__ == "__main__":
    main()
