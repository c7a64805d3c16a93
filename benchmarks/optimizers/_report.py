"""The page and the figures of a record."""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.optimizers._equal_steps import (
    all_raise,
    best_choice,
    ends_above_its_start,
    runs_of,
)
from benchmarks.optimizers._figure import curves
from benchmarks.optimizers._goals import GOALS
from benchmarks.optimizers._problem import Problem
from benchmarks.optimizers._reach import defaults_table, reach_table
from benchmarks.optimizers._record import Record
from benchmarks.optimizers._summary import Row, at, middle, rows_of
from benchmarks.optimizers.methods import METHODS
from benchmarks.optimizers.problems import PROBLEMS

HEAD = (
    "| optimizer | setting | at the end | at equal steps | CPU s to target | ÷ AdamW's "
    "| steps | CPU ms a step (wall) | compile, CPU s | seeds |"
)
HEAD_AT_STEPS = (
    "| optimizer | setting | chosen | at equal steps | CPU s | CPU ms a step | compile, CPU s "
    "| seeds above their first loss |"
)
INTRODUCTION = """\
# Optimizers side by side

Made by `python -m benchmarks.optimizers --report` from the runs in this folder, which
`python -m benchmarks.optimizers --peer ENV/bin/python` makes. It says there how settings are
chosen and what is timed. Numbers are medians over five seeds; behind them is the seeds' range,
which holds the true median with 94 %.

The measure of time is the process's CPU time (`time.process_time`, all its threads) on one core,
which other work shared; wall time says how long it had to wait. Budgets are short, so that a
problem costs a quarter of an hour of CPU time and not two: what is compared is the beginning of a
training. A grid of four or five settings is coarse; where the best lies at its edge, a remark says
so, and a better one may lie beyond.

That comparison has five problems. All twelve are compared at equal steps, where nothing of ours is
tuned: `--equal-steps` makes those runs. Each optimizer has the settings that its own documentation
gives, with the constant rate that stands there. Beside them stands the best choice of each peer:
seed 0 chooses among its rates, each of them constant and annealed, and seeds 1 to 5 are counted.
"""
REACH = """\
## What the defaults reach

Medians over seeds 1 to 5 of the held-out measure. A win is a smaller median, a tie one within 2 %.
AdamW's CPU seconds are those of its best setting at equal time where a problem has a budget, and at
equal steps elsewhere; both sides may stop at their best value until then.

The runs come from two machines. On the second, since 2026-11-27, a CPU second does about half as
much: a step of AdamW on the digits preset takes 2.0 times as long (`python -m benchmarks.digits
--documented`, on both). All runs of `kfac(like=like)` are from there. So are AdamW's and those of
`kfe_adam(0.01)` on the perceptron, the Gaussian autoencoder, the convolutions, the GRU, the
regression and the diffusion. On the other six AdamW's are from the first, so that equal CPU seconds
count against ours there. All runs of ours in these tables collected factors at each step, the
default then. Now they are collected at refreshes: `python -m benchmarks.optimizers._clock`.
"""
DEFAULTS = """\
## At equal steps, as documented and at a peer's best
"""


def write_report(folder: Path) -> None:
    """``README.md`` and a figure for each problem, in ``folder``."""
    records = {name: Record(folder / f"{name}.jsonl").lines for name in PROBLEMS}
    parts = [INTRODUCTION, REACH, reach_table(records), DEFAULTS, defaults_table(records)]
    for problem in PROBLEMS.values():
        lines = records[problem.name]
        parts.append(f"## {problem.title}\n\n" + section(lines, problem))
        if problem.budget and any(line["seed"] and not line["error"] for line in lines):
            (folder / f"{problem.name}.svg").write_bytes(curves(lines, METHODS, problem))
            parts.append(f"![{problem.title}: by steps and by time]({problem.name}.svg)\n")
    (folder / "README.md").write_text("\n".join(parts))


def section(lines: Sequence[Any], problem: Problem) -> str:
    """The tables of one problem: at equal time where it has a budget, and at equal steps."""
    if not lines:
        return "No run has been made yet.\n"
    parts = [_at_equal_time(lines, problem)] if problem.budget else []
    made = [line for line in lines if line.get("least_steps")]
    return "\n".join([*parts, *([_at_equal_steps(made, problem)] if made else [])])


def _at_equal_time(lines: Sequence[Any], problem: Problem) -> str:
    """The table of the tuned optimizers, and the errors below it."""
    lines = [line for line in lines if not line.get("least_steps")]
    goal, equal, rows = rows_of(lines, METHODS, problem)
    said = [
        f"Measure: {problem.measure}. Budget: {problem.budget:g} CPU s.",
        "The target waits for AdamW's seeds."
        if goal is None
        else f"Target, AdamW's median at the end: {goal:.4g}.",
    ]
    if equal is not None:
        said.append(f"Equal steps: {equal:g}.")
    table = [
        HEAD,
        "|" + "---|" * HEAD.count(" |"),
        *(_cells(x, rows["adamw"]) for x in rows.values()),
    ]
    remarks = [f"- {row.method}: {row.remark}" for row in rows.values() if row.remark]
    tried = [f"- {row.method}: {_grid(row)}" for row in rows.values() if row.grid]
    goals = [goal.said(rows) for goal in GOALS.get(problem.name, ())]
    parts = [
        [" ".join(said)],
        [_made(lines)],
        table,
        remarks,
        ["Goals:"],
        goals,
        ["Grids, at their end:"],
        tried,
    ]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def _at_equal_steps(lines: Sequence[Any], problem: Problem) -> str:
    """Every setting that ran on all seeds."""
    said = f"At equal steps: {problem.steps}. Measure: {problem.measure}."
    table = [HEAD_AT_STEPS, "|" + "---|" * HEAD_AT_STEPS.count(" |")]
    for method in METHODS.values():
        best = best_choice(lines, method, problem)
        settings = [(setting, "documented") for setting in method.documented]
        if best is not None:
            settings.append((best, "best"))
        for setting, how in settings:
            if runs := runs_of(lines, method, setting, problem):
                table.append(_run_cells(method.title, setting, how, runs, problem))
    return "\n\n".join([said, _made(lines), "\n".join(table)]) + "\n"


def _run_cells(
    title: str, setting: Mapping[str, Any], how: str, runs: Sequence[Any], problem: Problem
) -> str:
    """A row of the table at equal steps."""
    ended = [line for line in runs if not line["error"]]
    counted = [
        statistics.median(of(line) for line in ended) if ended else None
        for of in (
            lambda x: float(np.interp(problem.steps, x["steps"], x["cpu_s"])),
            lambda x: 1e3 * x["cpu_s"][-1] / x["steps"][-1],
            lambda x: x["compile_cpu_s"],
        )
    ]
    cells = [
        title,
        _setting(setting),
        how,
        "does not run"
        if all_raise(runs)
        else _interval(middle([at(line, "steps", problem.steps) for line in runs])),
        *map(_number, counted),
        "" if all_raise(runs) else f"{sum(map(ends_above_its_start, runs))} of {len(runs)}",
    ]
    return "| " + " | ".join(cells) + " |"


def _made(lines: Sequence[Any]) -> str:
    """When, with what, and at which cost."""
    dates = sorted({line["date"] for line in lines})
    versions = {f"{name} {x}" for line in lines for name, x in line["versions"].items()}
    minutes = sum(line["run_cpu_s"] for line in lines) / 60
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    cost = f"{len(lines)} runs, {minutes:.3g} CPU minutes with compilation"
    if shared := sum(line.get("shared_machine", False) for line in lines):
        cost += f"; {shared} of them beside other work on the same machine, which CPU times show"
    flags = ", ".join(sorted({f"`{x}`" for line in lines if (x := line.get("xla_flags"))}))
    return f"Made {when} with {', '.join(sorted(versions))}, {flags or 'no XLA flags'}: {cost}."


def _grid(row: Row) -> str:
    return "; ".join(f"{_setting(setting)}: {_number(x)}" for setting, x in row.grid)


def _setting(setting: Mapping[str, Any]) -> str:
    words = (name if value is True else f"{name} {value:g}" for name, value in setting.items())
    return ", ".join(words)


def _cells(row: Row, adamw: Row) -> str:
    ratio = None
    if row.to_target and adamw.to_target and math.isfinite(adamw.to_target[0]):
        ratio = row.to_target[0] / adamw.to_target[0]
    time = "" if row.step_ms is None else f"{row.step_ms:.3g} ({row.step_wall_ms:.3g})"
    cells = [
        row.method,
        _setting(row.setting or {}),
        _interval(row.final),
        _interval(row.at_steps),
        _interval(row.to_target),
        _number(ratio),
        _number(row.steps),
        time,
        _number(row.compile_s),
        str(row.seeds),
    ]
    return "| " + " | ".join(cells) + " |"


def _number(x: float | None) -> str:
    return "" if x is None else "never" if math.isinf(x) else f"{x:.4g}"


def _interval(found: tuple[float, float, float] | None) -> str:
    if found is None:
        return ""
    return f"{_number(found[0])} ({_number(found[1])} to {_number(found[2])})"
