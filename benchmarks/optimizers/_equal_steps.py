"""Runs of equal steps: what documentation gives, and the best of a few settings by seed 0."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.optimizers._method import Method, Setting
from benchmarks.optimizers._problem import Problem
from benchmarks.optimizers._record import SEEDS, Key, Record, chosen, key_of
from benchmarks.optimizers._summary import at

Lines = Sequence[Mapping[str, Any]]


def run_key(method: Method, setting: Setting, seed: int, problem: Problem) -> Key:
    """Key of a run that takes the problem's steps, and its CPU seconds too where it is timed."""
    goes_on = method.timed and setting == method.documented[0]
    budget = problem.budget if goes_on else 0.0
    return Key(method.name, json.dumps(dict(setting)), seed, budget, problem.steps)


def missing_at_steps(record: Record, methods: Sequence[Method], problem: Problem) -> Key | None:
    """The next run at equal steps that is not there.

    The method's documented settings come first, on all seeds, then its choices on seed 0, and then
    the best one on the others.
    """
    for method in methods:
        if not method.is_for(problem):
            continue
        runs = [(setting, seed) for setting in method.documented for seed in (0, *SEEDS)]
        if not problem.costly:
            runs += [(setting, 0) for setting in method.choices]
        best = best_choice(record.lines, method, problem)
        runs += [(best, seed) for seed in SEEDS if best is not None]
        keys = (run_key(method, setting, seed, problem) for setting, seed in runs)
        found = next((key for key in keys if key not in record), None)
        if found is not None:
            return found
    return None


def best_choice(lines: Lines, method: Method, problem: Problem) -> Setting | None:
    """The choice with the least validation of seed 0 at equal steps; ``None`` before all have run,
    or where all have failed.

    Of a costly problem it is the one that seed 0 chose at equal time, unless all have run.
    """
    found = {key_of(line): at(line, "steps", problem.steps) for line in lines}
    ends = [found.get(run_key(method, s, 0, problem)) for s in method.choices]
    if not ends or any(end is None for end in ends):
        return chosen(lines, method, problem) if problem.costly and method.choices else None
    known = [end for end in ends if end is not None]
    return method.choices[known.index(min(known))] if min(known) < float("inf") else None


def runs_of(
    lines: Lines, method: Method, setting: Setting, problem: Problem, seeds: Sequence[int] = SEEDS
) -> list[Mapping[str, Any]]:
    """The runs of a setting that are there."""
    found = {key_of(line): line for line in lines}
    keys = [run_key(method, setting, seed, problem) for seed in seeds]
    return [found[key] for key in keys if key in found]


def all_raise(lines: Lines) -> bool:
    """Whether there are runs, and each ended with an error, which is not a divergence."""
    return bool(lines) and all(line["error"] for line in lines)


def ends_above_its_start(line: Mapping[str, Any]) -> bool:
    """Whether a batch's loss is greater at the end than at the first step, or not finite."""
    if line["error"]:
        return True
    first, last = line["loss"][1], line["loss"][-1]
    return first is None or last is None or line["validation"][-1] is None or last > first
