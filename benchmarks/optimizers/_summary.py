"""What is read off the runs of one problem."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.optimizers._method import Method
from benchmarks.optimizers._problem import Problem
from benchmarks.optimizers._record import (
    SEEDS,
    chosen,
    fails_alike,
    final,
    of_grid,
    seed_runs,
    target,
)

Runs = Sequence[Mapping[str, Any]]


class Row(NamedTuple):
    """One method on one problem; medians over the seeds, and what is not known is ``None``.

    Attributes:
        method: Its title.
        setting: That the grid has chosen.
        final: Validation at the end of the budget: median, least, greatest.
        at_steps: Validation after as many steps as every K-FAC takes: likewise; infinite where the
            method does not take so many.
        to_target: CPU seconds until the target: median, least, greatest; infinite where more
            than half of the seeds, or one, do not reach it.
        steps: Taken within the budget.
        step_ms: CPU milliseconds of a step.
        step_wall_ms: Wall milliseconds of a step.
        compile_s: CPU seconds of the first step.
        seeds: That have come to their end, with a finite validation.
        grid: What each setting led to at the grid's end.
        remark: Errors, what has not run, and where the setting lies at the edge of its grid.
    """

    method: str
    setting: Mapping[str, Any] | None = None
    final: tuple[float, float, float] | None = None
    at_steps: tuple[float, float, float] | None = None
    to_target: tuple[float, float, float] | None = None
    steps: float | None = None
    step_ms: float | None = None
    step_wall_ms: float | None = None
    compile_s: float | None = None
    seeds: int = 0
    grid: Sequence[tuple[Mapping[str, Any], float]] = ()
    remark: str = ""


def middle(numbers: Sequence[float]) -> tuple[float, float, float]:
    """Median, least and greatest: of five the range holds the median with 94 %."""
    return statistics.median(numbers), min(numbers), max(numbers)


def at(line: Mapping[str, Any], axis: str, place: float) -> float:
    """Validation there, linearly between evaluations; infinite behind the run's end."""
    if line["error"]:
        return float("inf")
    x, y = numbers(line, axis)
    return float(np.interp(place, x, y, right=np.inf))


def time_to(line: Mapping[str, Any], goal: float) -> float:
    """CPU seconds until the validation is first at the goal; infinite where it never is."""
    if line["error"]:
        return float("inf")
    x, y = numbers(line, "cpu_s")
    below = np.flatnonzero(y <= goal)
    if not len(below):
        return float("inf")
    i = int(below[0])
    if i == 0:
        return 0.0
    share = (y[i - 1] - goal) / (y[i - 1] - y[i]) if np.isfinite(y[i - 1]) else 1.0
    return float(x[i - 1] + share * (x[i] - x[i - 1]))


def numbers(line: Mapping[str, Any], axis: str) -> tuple[np.ndarray, np.ndarray]:
    """``axis`` and validation of a run; what was not finite is infinite."""
    y = [np.inf if v is None else v for v in line["validation"]]
    return np.asarray(line[axis], float), np.asarray(y, float)


def fewest_steps(lines: Runs, methods: Sequence[Method], problem: Problem) -> float | None:
    """Steps that every run of every K-FAC takes within the budget.

    One that takes less than a tenth of another's would leave nothing to compare: it is left out.
    """
    kfacs = [method for method in methods if method.name.startswith("kfac")]
    runs = [_whole(seed_runs(lines, method, problem)) for method in kfacs]
    fewest = [min(line["steps"][-1] for line in whole) for whole in runs if whole]
    return min((steps for steps in fewest if steps >= max(fewest) / 10), default=None)


def rows_of(
    lines: Runs, methods: Mapping[str, Method], problem: Problem
) -> tuple[float | None, float | None, dict[str, Row]]:
    """The target, the steps of equal steps, and a row for each method of the problem, by name."""
    ours = [m for m in methods.values() if m.is_for(problem) and m.settings]
    goal, equal = target(lines, methods["adamw"], problem), fewest_steps(lines, ours, problem)
    return goal, equal, {x.name: _row(lines, x, problem, goal, equal) for x in ours}


def _row(
    lines: Runs, method: Method, problem: Problem, goal: float | None, equal: float | None
) -> Row:
    runs = seed_runs(lines, method, problem)
    whole, grid = _whole(runs), of_grid(lines, method, problem)
    tried = [(line["setting"], final(line)) for line in grid if line is not None]
    setting = chosen(lines, method, problem)
    remark = "; ".join([*_remarks(grid, runs), *at_edge(setting or {}, method.settings)])
    row = Row(method.title, setting, grid=tried, remark=remark)
    if not whole:
        return row
    most = max(line["steps"][-1] for line in whole)
    return row._replace(
        final=middle([final(line) for line in runs]),
        at_steps=middle([at(x, "steps", equal) for x in runs]) if equal and most >= equal else None,
        to_target=None if goal is None else middle([time_to(x, goal) for x in runs]),
        steps=statistics.median(x["steps"][-1] for x in whole),
        step_ms=statistics.median(1e3 * x["cpu_s"][-1] / x["steps"][-1] for x in whole),
        step_wall_ms=statistics.median(1e3 * x["wall_s"][-1] / x["steps"][-1] for x in whole),
        compile_s=statistics.median(x["compile_cpu_s"] for x in whole),
        seeds=len(whole),
    )


def _whole(runs: Runs) -> list[Mapping[str, Any]]:
    return [line for line in runs if np.isfinite(final(line))]


def at_edge(setting: Mapping[str, Any], settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Which numbers of a setting are the least or the greatest of several that were tried."""
    words = []
    for name, value in setting.items():
        tried = {other[name] for other in settings}
        if len(tried) > 1 and value in (min(tried), max(tried)):
            which = "least" if value == min(tried) else "greatest"
            words.append(f"{name} {value:g} is the {which} that was tried")
    return words


def _remarks(grid: Sequence[Any], runs: Runs) -> list[str]:
    ended = [line for line in grid if line is not None]
    failed = [line["error"] for line in [*ended, *runs] if line["error"]]
    words = []
    if failed:
        words.append(f"{len(failed)} of {len(ended) + len(runs)} runs failed: {failed[0]}")
    if missing := len(grid) - len(ended):
        which = "left out" if fails_alike(grid) else "to be made"
        words.append(f"{missing} of {len(grid)} runs of the grid are {which}")
    elif len(failed) < len(ended) and (missing := len(SEEDS) - len(runs)):
        words.append(f"{missing} of {len(SEEDS)} seeds are to be run")
    return words
