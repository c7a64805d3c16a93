"""What the defaults reach over all problems, beside tuned peers, and what they are to reach."""

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from benchmarks.optimizers._equal_steps import (
    Lines,
    all_raise,
    best_choice,
    ends_above_its_start,
    runs_of,
)
from benchmarks.optimizers._method import Method, Setting
from benchmarks.optimizers._problem import Problem
from benchmarks.optimizers._record import FOLDER, SEEDS, final, seed_runs
from benchmarks.optimizers._summary import at, numbers
from benchmarks.optimizers.methods import METHODS
from benchmarks.optimizers.problems import PROBLEMS

OURS = METHODS["kfac"], METHODS["kfe_adam"]
TIE = 0.02  # two medians that differ by less are equal
LEAST_SECONDS = 60.0  # given where compilation counts

Pairs = Mapping[str, tuple[float | None, float | None]]


def reach_table(records: Mapping[str, Lines]) -> str:
    """One line for each goal; ``records`` has the lines of every problem by name."""
    rows = [*_above(records), *_against(records), *_in_time(records), *_numbers(records)]
    rows += _step_times()
    head = ["| | found | to reach |", "|---|---|---|"]
    return "\n".join([*head, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def defaults_table(records: Mapping[str, Lines]) -> str:
    """Medians at equal steps: a row for each problem, a column for each way of setting."""
    usual = [(m.title, m, m.documented[0]) for m in METHODS.values() if m.documented]
    best = [(f"{m.title}, best", m, None) for m in METHODS.values() if m.choices]
    columns = [*usual, *best]
    head = ["problem, steps", *(title for title, _, _ in columns)]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for problem in PROBLEMS.values():
        found = records.get(problem.name, ())
        cells = [f"{problem.title}, {problem.steps}"]
        for _, method, setting in columns:
            chosen = best_choice(found, method, problem) if setting is None else setting
            cells.append(_cell(found, method, chosen, problem))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(lines: Lines, method: Method, setting: Setting | None, problem: Problem) -> str:
    if not method.is_for(problem):
        return "–"
    if setting is not None and all_raise(runs_of(lines, method, setting, problem)):
        return "does not run"
    x = None if setting is None else at_equal_steps(lines, method, setting, problem)
    return _shown(x)


def _shown(x: float | None) -> str:
    return "not run" if x is None else "diverges" if math.isinf(x) else f"{x:.4g}"


# ---------------------------------------------------------------- medians of the seeds


def _median(
    lines: Lines,
    method: Method,
    setting: Setting | None,
    problem: Problem,
    of: Callable[[Mapping[str, Any]], float],
) -> float | None:
    """Over all of ``SEEDS``; ``None`` before all have run."""
    runs = [] if setting is None else runs_of(lines, method, setting, problem)
    return statistics.median(map(of, runs)) if len(runs) == len(SEEDS) else None


def at_equal_steps(
    lines: Lines, method: Method, setting: Setting | None, problem: Problem
) -> float | None:
    """Validation after the problem's steps."""
    return _median(lines, method, setting, problem, lambda x: at(x, "steps", problem.steps))


def _tuned(lines: Lines, name: str, problem: Problem) -> float | None:
    """A peer's best: with its choice, or as documented where that is less.

    On costly problems the choice was made at another number of steps, and the documented setting
    may be ahead of it.
    """
    method = METHODS[name]
    best = at_equal_steps(lines, method, best_choice(lines, method, problem), problem)
    plain = [at_equal_steps(lines, method, s, problem) for s in method.documented]
    return None if best is None else min(best, *(x for x in plain if x is not None), best)


def _best_until(line: Mapping[str, Any], seconds: float) -> float:
    """The least validation within these CPU seconds."""
    if line["error"]:
        return math.inf
    x, y = numbers(line, "cpu_s")
    return float(y[x <= max(seconds, 0.0)].min())


def _adamw(lines: Lines, problem: Problem) -> tuple[float, float, float] | None:
    """AdamW's best validation, the CPU seconds to it, and those of its compilation.

    Where the problem has a budget, its runs at equal time are the longer ones.
    """
    method = METHODS["adamw"]
    if problem.budget:
        runs = seed_runs(lines, method, problem)
    else:
        best = best_choice(lines, method, problem)
        runs = [] if best is None else runs_of(lines, method, best, problem)
    runs = [line for line in runs if math.isfinite(final(line))]
    if len(runs) < len(SEEDS):
        return None
    ends = [numbers(line, "cpu_s") for line in runs]
    return (
        statistics.median(float(y.min()) for _, y in ends),
        statistics.median(float(x[np.argmin(y)]) for x, y in ends),
        statistics.median(line["compile_cpu_s"] for line in runs),
    )


# ---------------------------------------------------------------- the rows


def _above(records: Mapping[str, Lines]) -> Iterable[tuple[str, str, str]]:
    for name in ("kfac", "kfac_rate", "kfe_adam", "adamw", "schedule_free", "muon", "soap"):
        method = METHODS[name]
        for setting in method.documented:
            above, whole = [], 0
            for problem in PROBLEMS.values():
                lines = records.get(problem.name, ())
                runs = runs_of(lines, method, setting, problem, (0, *SEEDS))
                whole += len(runs) == 1 + len(SEEDS)
                above += [problem.name] * any(map(ends_above_its_start, runs))
            title = method.title.replace("rate,", f"{setting.get('learning_rate', 0):g},")
            said = f"{len(above)} of {whole} run" + f": {', '.join(above)}" * bool(above)
            words = f"problems that end above their first loss, any seed: {title}, as documented"
            yield words, said, "0" if method.name.startswith("kf") else ""


def _tally(pairs: Pairs) -> str:
    """Wins, ties and losses of the first number, which is to be small."""
    known = {name: (x, y) for name, (x, y) in pairs.items() if x is not None and y is not None}
    ties = [k for k, (x, y) in known.items() if math.isfinite(x) and abs(x - y) <= TIE * abs(y)]
    wins = [k for k, (x, y) in known.items() if x < y and k not in ties]
    lost = [k for k in known if k not in wins and k not in ties]
    words = [f"{len(wins)} wins, {len(ties)} ties"]
    words += [
        f"{word}: {', '.join(names)}" for word, names in (("tied", ties), ("lost", lost)) if names
    ]
    missing = [name for name in pairs if name not in known]
    if missing:
        words.append(f"not run: {', '.join(missing) if known else 'all'}")
    return "; ".join(words)


def _better(values: Iterable[float | None]) -> float | None:
    """The least; ``None`` where one is not known."""
    found = list(values)
    known = [x for x in found if x is not None]
    return min(known) if len(known) == len(found) else None


def _chosen_by_seed_0(lines: Lines, problem: Problem) -> float | None:
    """Of that one of ours which is better on seed 0."""
    ends = []
    for method in OURS:
        runs = runs_of(lines, method, method.documented[0], problem, (0,))
        if not runs:
            return None
        ends.append(at(runs[0], "steps", problem.steps))
    method = OURS[int(np.argmin(ends))]
    return at_equal_steps(lines, method, method.documented[0], problem)


def _against(records: Mapping[str, Lines]) -> Iterable[tuple[str, str, str]]:
    def ours(lines: Lines, problem: Problem) -> list[float | None]:
        return [at_equal_steps(lines, m, m.documented[0], problem) for m in OURS]

    def pairs(
        first: Callable[[Lines, Problem], float | None],
        second: Callable[[Lines, Problem], float | None],
    ) -> str:
        found = {p.name: (records.get(p.name, ()), p) for p in PROBLEMS.values()}
        return _tally({name: (first(*x), second(*x)) for name, x in found.items()})

    def alone(lines: Lines, problem: Problem) -> float | None:
        return ours(lines, problem)[0]

    def better(lines: Lines, problem: Problem) -> float | None:
        return _better(ours(lines, problem))

    def tuned(*names: str) -> Callable[[Lines, Problem], float | None]:
        return lambda lines, problem: _better(_tuned(lines, name, problem) for name in names)

    adamw, both = "against AdamW's best, equal steps", "the better of `kfac` and `kfe_adam`"
    yield f"`kfac(like=like)` {adamw}", pairs(alone, tuned("adamw")), "≥ 8 of 12"
    yield f"{both} {adamw}", pairs(better, tuned("adamw")), "≥ 11 of 12"
    yield (
        f"that of the two which seed 0 chooses, {adamw}",
        pairs(_chosen_by_seed_0, tuned("adamw")),
        "",
    )
    for names, title, goal in (
        (("soap", "muon"), "the better of SOAP's and Muon's best", "≥ 7 of 12"),
        (("soap",), "SOAP's best", ""),
        (("muon",), "Muon's best", ""),
        (("schedule_free",), "schedule-free AdamW's best", ""),
    ):
        yield f"{both} against {title}, equal steps", pairs(better, tuned(*names)), goal
    peer = METHODS["kfac_jax_adaptive"]

    def of_peer(lines: Lines, problem: Problem) -> float | None:
        if all_raise(runs_of(lines, peer, peer.documented[0], problem)):
            return None
        return at_equal_steps(lines, peer, peer.documented[0], problem)

    title = "against kfac-jax as documented, equal steps"
    yield f"`kfac(like=like)` {title}", pairs(alone, of_peer), ""
    yield f"{both} {title}", pairs(better, of_peer), ""


def _in_time(records: Mapping[str, Lines]) -> Iterable[tuple[str, str, str]]:
    plain: dict[str, tuple[float | None, float | None]] = {}
    compiled = dict(plain)
    for problem in PROBLEMS.values():
        lines = records.get(problem.name, ())
        adamw = _adamw(lines, problem)
        if adamw is None:
            plain[problem.name] = compiled[problem.name] = None, None
            continue
        best, seconds, compiling = adamw
        given = max(LEAST_SECONDS, seconds + compiling)

        def within(line: Mapping[str, Any], seconds: float = seconds) -> float:
            return _best_until(line, seconds)

        def with_compilation(line: Mapping[str, Any], given: float = given) -> float:
            return math.inf if line["error"] else _best_until(line, given - line["compile_cpu_s"])

        for pairs, of in ((plain, within), (compiled, with_compilation)):
            ends = [_median(lines, m, m.documented[0], problem, of) for m in OURS]
            pairs[problem.name] = _better(ends), best
    words = "the better of `kfac` and `kfe_adam` at AdamW's CPU seconds to its best held-out value"
    yield words, _tally(plain), "≥ 8 of 12"
    yield (
        f"the same with compilation, at least {LEAST_SECONDS:g} s given",
        _tally(compiled),
        "≥ 8 of 12",
    )


def _numbers(records: Mapping[str, Lines]) -> Iterable[tuple[str, str, str]]:
    for name, peers, goal in (
        ("burgers", ("lbfgs", "soap"), "`kfac` ≤ 0.070; the better ≤ 0.056"),
        ("poisson", ("soap",), "`kfac` ≤ 1.2e-4"),
        ("decoder", ("muon", "soap", "adamw"), "the better ≤ 2.20"),
    ):
        problem, lines = PROBLEMS[name], records.get(name, ())

        def at_the_end(line: Mapping[str, Any], budget: float = problem.budget) -> float:
            return at(line, "cpu_s", budget)

        said = []
        for method in OURS:
            end = _median(lines, method, method.documented[0], problem, at_the_end)
            said.append(f"{method.title} {_shown(end)}")
        for peer in peers:
            runs = seed_runs(lines, METHODS[peer], problem)
            end = statistics.median(map(final, runs)) if len(runs) == len(SEEDS) else None
            said.append(f"{METHODS[peer].title} {_shown(end)}")
        yield f"{problem.title}, {problem.budget:g} CPU s", ", ".join(said), goal


def _step_times() -> Iterable[tuple[str, str, str]]:
    """From programs that take turns in one process: runs above were made on several machines."""
    found = json.loads((FOLDER / "step_times.json").read_text())["problems"]
    for name, title, goal in (
        ("kfe_adam", "`jk.kfe_adam`", "≤ 1.15 (decoder), 1.5 (convolution), 2.5 (perceptron)"),
        ("adaptive", "`jk.kfac()`", "≤ 2.0 (decoder), 2.7 (convolution), 4.0 (perceptron)"),
        ("SOAP", "SOAP", ""),
    ):
        ratios = (f"{x} {times[f'{name} over AdamW']:.2f}" for x, times in found.items())
        yield f"a step of {title} ÷ AdamW's, CPU time", ", ".join(ratios), goal
