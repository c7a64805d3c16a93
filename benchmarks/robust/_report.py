"""The page of the record."""

import json
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.optimizers._problem import Problem

Record = dict[str, Any]

RECORDED = Path(__file__).parent.parent / "results" / "optimizers"
LARGEST_LOSS = 1.02  # median over the recorded median
LEAST_GAIN = 0.5  # of the gain of Adam's best rate


def page(
    records: list[Record],
    problems: dict[str, Problem],
    scripts: Iterable[Problem],
    planned: Iterable[Record],
) -> str:
    """The record as a page; ``planned`` are all runs, by what tells them apart."""
    missing = [run for run in planned if not any(run.items() <= x.items() for x in records)]
    kfac = [r for r in records if r["method"] == "kfac"]
    names = [problem.name for problem in scripts]
    changed = [r for r in kfac if r["variation"] != "unchanged" or r["problem"] in names]
    plain = [r for r in kfac if r["variation"] == "unchanged" and r["problem"] not in names]
    above = [r for r in kfac if not r["last"] <= r["first"]]
    stuck = [r for r in changed if _is_stuck(r, records)]
    worse = [row for row in map(_comparison_of(plain), problems) if row and row[-1] > LARGEST_LOSS]
    dates = sorted({record["date"] for record in records})
    lines = [
        f"Made by `python -m benchmarks.robust`, {dates[0]} to {dates[-1]}.",
        "",
        f"- runs of adaptive K-FAC: {len(kfac)}",
        f"- above its start: {len(above)}" + _listed(above),
        f"- gained less than {LEAST_GAIN} of what the best of three rates of Adam gained: "
        f"{len(stuck)} of {len(changed)}" + _listed(stuck),
        f"- problems whose median is more than 2 % above the recorded one: {len(worse)}"
        + "".join(f"; {row[0]}" for row in worse),
        f"- runs that are not made yet: {len(missing)}" + _problems(missing),
        "",
        "## Awkward problems",
        "",
        "First and last are the measure before the first step and after the last one. Highest is "
        "the highest loss of a batch over the first one. Rejected counts the steps that were not "
        "made, and first damping is λ of the first step.",
        "",
        "| problem | change | seed | steps | first | last | Adam's best | highest | rejected "
        "| first damping |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(_row(record, records) for record in changed),
        "",
        "## The problems of the optimizers, unchanged",
        "",
        "Medians beside those of the [record of optimizers](optimizers.md), over the same seeds.",
        "",
        "| problem | seeds | steps | median | recorded | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for row in map(_comparison_of(plain), problems):
        if row is not None:
            name, seeds, steps, now, before, ratio = row
            lines.append(f"| {name} | {seeds} | {steps} | {now:.4g} | {before:.4g} | {ratio:.3f} |")
    return "\n".join(lines) + "\n"


def _listed(records: list[Record]) -> str:
    return "".join(f"; {r['problem']}, {r['variation']}, seed {r['seed']}" for r in records)


def _problems(records: list[Record]) -> str:
    names = dict.fromkeys(record["problem"] for record in records)
    return f" ({', '.join(names)})" if names else ""


def _peers(record: Record, records: list[Record]) -> list[float]:
    same = ("problem", "variation", "seed", "steps")
    adam = (r for r in records if r["method"] == "adam")
    return [r["last"] for r in adam if all(r[name] == record[name] for name in same)]


def _is_stuck(record: Record, records: list[Record]) -> bool:
    best = min((x for x in _peers(record, records) if x == x), default=record["first"])
    return record["first"] - record["last"] < LEAST_GAIN * (record["first"] - best)


def _row(record: Record, records: list[Record]) -> str:
    best = min((x for x in _peers(record, records) if x == x), default=None)
    cells = (
        record["problem"],
        record["variation"],
        record["seed"],
        record["steps"],
        f"{record['first']:.4g}",
        f"{record['last']:.4g}",
        "" if best is None else f"{best:.4g}",
        f"{record['highest'] / record['first_loss']:.3g}",
        record["rejected"],
        f"{record['first_damping']:.3g}",
    )
    return f"| {' | '.join(map(str, cells))} |"


def _comparison_of(plain: list[Record]) -> Callable[[str], tuple[Any, ...] | None]:
    """For a problem: name, seeds, steps, both medians and their ratio; ``None`` without runs."""

    def comparison(name: str) -> tuple[Any, ...] | None:
        runs = {r["seed"]: r for r in plain if r["problem"] == name}
        lines = (RECORDED / f"{name}.jsonl").read_text().splitlines()
        before = {}
        for found in map(json.loads, lines):
            if found["method"] == "kfac" and found["setting"] == {} and found["seed"] in runs:
                steps = runs[found["seed"]]["steps"]
                before[found["seed"]] = found["validation"][found["steps"].index(steps)]
        seeds = sorted(runs.keys() & before.keys())
        if not seeds:
            return None
        now = statistics.median(runs[seed]["last"] for seed in seeds)
        then = statistics.median(before[seed] for seed in seeds)
        steps = runs[seeds[0]]["steps"]
        return name, ", ".join(map(str, seeds)), steps, now, then, now / then

    return comparison
