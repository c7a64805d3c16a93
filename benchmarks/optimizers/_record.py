"""Runs in files of one JSON line each, written when a run is finished."""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.optimizers._method import Method
from benchmarks.optimizers._problem import Problem

FOLDER = Path(__file__).parents[1] / "results" / "optimizers"
SEEDS = (1, 2, 3, 4, 5)  # of the setting that is chosen, which seed 0 has chosen
GRID = 1 / 3  # of the budget


class Key(NamedTuple):
    """What a run is known by; it lasts ``budget`` CPU seconds and ``steps`` steps at least."""

    method: str
    setting: str
    seed: int
    budget: float
    steps: int = 0


def key_of(line: Mapping[str, Any]) -> Key:
    """Of a line of the record."""
    steps = line.get("least_steps", 0)
    return Key(line["method"], json.dumps(line["setting"]), line["seed"], line["budget"], steps)


class Record:
    """The runs of one problem, on disk.

    Args:
        path: A file of JSON lines, which need not be there. What a killed process has left of a
            line is taken away.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        text = path.read_text() if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            path.write_text(whole)
        self.lines: list[dict[str, Any]] = [json.loads(line) for line in whole.splitlines()]

    def __contains__(self, key: Key) -> bool:
        return any(key_of(line) == key for line in self.lines)

    def add(self, line: dict[str, Any]) -> None:
        """Write a finished run."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")
        self.lines.append(line)


def final(line: Mapping[str, Any]) -> float:
    """The last validation of a run, infinite where it failed or diverged."""
    found = None if line.get("error") else line["validation"][-1]
    return float("inf") if found is None else found


def of_grid(lines: Iterable[Mapping[str, Any]], method: Method, problem: Problem) -> list[Any]:
    """The runs of the grid of a method, in the grid's order; ``None`` where one is missing."""
    found = {key_of(line): line for line in lines}
    return [found.get(key) for key in grid_keys(method, problem)]


def grid_keys(method: Method, problem: Problem) -> list[Key]:
    """Of the runs that choose a setting."""
    budget = GRID * problem.budget
    return [Key(method.name, json.dumps(dict(s)), 0, budget) for s in method.settings]


def fails_alike(grid: Iterable[Any]) -> bool:
    """Whether two settings or more have run, and all of them failed with one error."""
    errors = [line["error"] for line in grid if line is not None]
    return len(errors) > 1 and bool(errors[0]) and len(set(errors)) == 1


def chosen(lines: Sequence[Mapping[str, Any]], method: Method, problem: Problem) -> Any:
    """The setting with the least validation at the grid's end; ``None`` before all have run, or
    where none has come to its end.
    """
    grid = of_grid(lines, method, problem)
    if not grid or None in grid or not min(map(final, grid)) < float("inf"):
        return None
    return min(grid, key=final)["setting"]


def seed_runs(
    lines: Sequence[Mapping[str, Any]], method: Method, problem: Problem
) -> list[Mapping[str, Any]]:
    """The finished runs of the setting that was chosen."""
    setting = chosen(lines, method, problem)
    return [
        line
        for line in lines
        if line["method"] == method.name
        and line["setting"] == setting
        and line["seed"] in SEEDS
        and line["budget"] == problem.budget
        and not line.get("least_steps")
    ]


def target(lines: Sequence[Mapping[str, Any]], adamw: Method, problem: Problem) -> float | None:
    """AdamW's median validation at the end of the budget; ``None`` before its seeds have run."""
    runs = seed_runs(lines, adamw, problem)
    return statistics.median(map(final, runs)) if len(runs) == len(SEEDS) else None
