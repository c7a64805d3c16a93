"""Measurements of training runs, their curves, and which optimizer reaches a target first."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.table import Table

from jaxkfac.curvature.capacity import Interval, mean_interval
from jaxkfac.jobs.report._page import (
    OPTIMIZERS,
    Axis,
    Line,
    panel_html,
    panels_html,
    terminal_table,
)

# ---------------- records, as plain values that survive JSON


class EpochRecord(NamedTuple):
    """Measurements after an epoch.

    Attributes:
        step: Number of updates made.
        examples: Training examples seen, with repetition.
        seconds: Seconds spent in training steps so far, without compilation and evaluation.
        train_loss: Mean over the whole training set, nats, without augmentation.
        train_accuracy: Over the whole training set, without augmentation, in [0, 1].
        test_loss: Mean over the test set, nats.
        test_accuracy: Over the test set, in [0, 1].
        validation_loss: Mean over the validation set, nats.
        validation_accuracy: Over the validation set, in [0, 1].
    """

    step: int
    examples: int
    seconds: float
    train_loss: float
    train_accuracy: float
    test_loss: float
    test_accuracy: float
    validation_loss: float
    validation_accuracy: float


class RunRecords(NamedTuple):
    """The history of one optimizer.

    Attributes:
        losses: Loss of each update, before it, over its examples, nats.
        epochs: Record of each epoch.
        compile_seconds: Seconds spent compiling, over all sessions of the run.
        skipped: Micro-batches and updates left out because something was not finite.
        gradient_norms: Norm of the gradient before clipping, averaged over the micro-batches of
            each update; ``None`` where it is not finite.
        learning_rates: Learning rate of each update.
    """

    losses: list[float]
    epochs: list[EpochRecord]
    compile_seconds: float = 0.0
    skipped: int = 0
    gradient_norms: Sequence[float | None] = ()
    learning_rates: Sequence[float] = ()

    @property
    def samples_per_second(self) -> float:
        """Training examples per second, without compilation and evaluation; 0 at first."""
        return self.epochs[-1].examples / self.epochs[-1].seconds if self.epochs else 0.0

    def to_plain(self) -> dict[str, Any]:
        """Dictionaries and lists only."""
        return {**self._asdict(), "epochs": [epoch._asdict() for epoch in self.epochs]}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> "RunRecords":
        """The inverse of :meth:`to_plain`."""
        return cls(**{**plain, "epochs": [EpochRecord(**epoch) for epoch in plain["epochs"]]})


# ---------------- the first optimizer at a target, in updates and in seconds


TARGET_ERROR = 0.03
"""Target error on the validation set."""
TO_TARGET = tuple(f"{unit} to {TARGET_ERROR:.0%}" for unit in ("updates", "s"))
"""Headings of the columns of :func:`at_target`."""
Runs = Mapping[str, Sequence[RunRecords]]
_UNITS = {"updates": ".0f", "seconds": ".1f"}


def reached(run: RunRecords, error: float = TARGET_ERROR) -> EpochRecord | None:
    """The first epoch after which the error on the validation set is at most ``error``."""
    return next((x for x in run.epochs if 1 - x.validation_accuracy <= error + 1e-9), None)


def at_target(runs: Sequence[RunRecords]) -> tuple[str, str]:
    """Updates and seconds to the target; for several runs the geometric mean and its interval.

    If a run misses the target, the cells say how many reach it: a mean over those alone would be
    biased.
    """
    times = _times(runs)
    if None in times["updates"]:
        count = sum(x is not None for x in times["updates"])
        reach_text = f"{count} of {len(runs)} seeds" if count else "never"
        return reach_text, reach_text
    updates, seconds = (_time(times[unit], form) for unit, form in _UNITS.items())
    return updates, seconds


def interval(numbers: Sequence[float], form: str, *, highest: float = math.inf) -> str:
    """A number; for several numbers their mean and, in brackets, its 95 % interval.

    The interval is cut off at 0 and at ``highest``, between which the quantity lies.
    """
    if len(numbers) == 1:
        return format(numbers[0], form)
    mean, low, high = mean_interval(numbers)
    return _text(Interval(mean, max(low, 0.0), min(high, highest)), form)


def _time(numbers: Sequence[float], form: str) -> str:
    """Like :func:`interval`, for positive values that are compared by ratios."""
    return format(numbers[0], form) if len(numbers) == 1 else _text(_geometric(numbers), form)


def _geometric(numbers: Sequence[float]) -> Interval:
    """The geometric mean with Student's interval of the logarithms."""
    return Interval(*map(math.exp, mean_interval(list(map(math.log, numbers)))))


def race_sentence(runs: Runs) -> str:
    """Describe which optimizer reaches the target first, in updates and in seconds.

    For several seeds it gives geometric means and 95 % intervals. One optimizer then counts as
    faster if the interval of the ratio excludes one; runs of the same seed see the same examples.

    Args:
        runs: The runs of each optimizer, one for each seed, in the same order.
    """
    finished = _with_epochs(runs)
    goal, clauses = f"{TARGET_ERROR:.0%} error on the validation images", []
    for name, runs_of_one in finished.items():
        label, times = OPTIMIZERS[name][0], _times(runs_of_one)
        if missed := times["updates"].count(None):
            often = f" in {missed} of {len(runs_of_one)} seeds" if missed < len(runs_of_one) else ""
            clauses.append(f"{label} does not reach {goal}{often}")
            continue
        updates, seconds = (_time(times[unit], form) for unit, form in _UNITS.items())
        means = f" (geometric means of {len(runs_of_one)} seeds, 95% intervals)"
        several = means if len(runs_of_one) > 1 else ""
        clauses.append(f"{label} reaches {goal} after {updates} updates and {seconds} s{several}")
    if len(finished) == 2 and not any(any(_times(x)["updates"]) for x in finished.values()):
        labels = [OPTIMIZERS[name][0] for name in finished]
        return f"Neither {labels[0]} nor {labels[1]} reaches {goal}."
    sentence = "; ".join(clauses) + "."
    verdicts = _verdicts(finished)
    return f"{sentence} {verdicts}" if verdicts else sentence


def race_record(runs: Runs) -> dict[str, Any]:
    """The content of :func:`race_sentence` as plain values for JSON.

    Returns:
        ``sentence``; ``error``, the target; ``optimizers``, with the ``updates`` and ``seconds`` to
        the target for each optimizer; and ``ratios`` of the first optimizer's to the second's.
        ``updates`` and ``seconds`` hold ``each`` run's value, ``None`` if it misses the target, and
        the ``interval`` ``{"mean", "low", "high"}`` of the geometric mean, ``None`` for a single
        run or if one misses. A ratio is such an interval, or ``None``.
    """
    finished = _with_epochs(runs)
    optimizers = {
        name: {
            unit: {"each": values, "interval": _record(values, _geometric)}
            for unit, values in _times(runs_of_one).items()
        }
        for name, runs_of_one in finished.items()
    }
    ratios = {unit: _ratio(finished, unit) for unit in _UNITS}
    return {
        "sentence": race_sentence(runs),
        "error": TARGET_ERROR,
        "optimizers": optimizers,
        "ratios": {unit: None if x is None else x._asdict() for unit, x in ratios.items()},
    }


def interval_record(numbers: Sequence[float | None]) -> dict[str, float] | None:
    """Mean and 95 % interval; ``None`` for fewer than two numbers or if one is ``None``."""
    return _record(numbers, mean_interval)


def _record(
    numbers: Sequence[float | None], mean: Callable[[Sequence[float]], Interval]
) -> dict[str, float] | None:
    finite = [x for x in numbers if x is not None]
    return mean(finite)._asdict() if len(finite) == len(numbers) > 1 else None


def _with_epochs(runs: Runs) -> Runs:
    return {
        name: runs_of_one
        for name, runs_of_one in runs.items()
        if runs_of_one and runs_of_one[0].epochs
    }


def _times(runs: Sequence[RunRecords]) -> dict[str, list[Any]]:
    epochs = [reached(run) for run in runs]
    return {
        "updates": [None if epoch is None else float(epoch.step) for epoch in epochs],
        "seconds": [None if epoch is None else epoch.seconds for epoch in epochs],
    }


def _ratio(runs: Runs, unit: str) -> Interval | None:
    """Geometric mean over the seeds of the ratio of the first optimizer to the second."""
    if len(runs) != 2:
        return None
    first, second = (_times(runs_of_one)[unit] for runs_of_one in runs.values())
    if len(first) != len(second) or len(first) < 2 or None in (*first, *second):
        return None
    return _geometric([x / y for x, y in zip(first, second, strict=True)])


def _verdicts(runs: Runs) -> str:
    times = {name: _times(runs_of_one) for name, runs_of_one in runs.items()}
    if len(runs) != 2 or any(None in by_unit["updates"] for by_unit in times.values()):
        return ""
    labels = [OPTIMIZERS[name][0] for name in runs]
    clauses = []
    for unit in _UNITS:
        ratio = _ratio(runs, unit)
        if ratio is not None:
            ratio_text = f" ({labels[0]}'s over {labels[1]}'s: {_text(ratio, '.2f')})"
            low, high = ratio.low, ratio.high
        else:
            (first, *_), (second, *_) = (by_unit[unit] for by_unit in times.values())
            ratio_text, low, high = "", first / second, first / second
        winner = labels[0] if high < 1 else labels[1] if low > 1 else None
        faster = "neither is shown to be faster" if ratio is not None else "neither is faster"
        faster = faster if winner is None else f"{winner} is faster"
        clauses.append((faster, f"in {unit}{ratio_text}"))
    (first_verdict, first), (second_verdict, second) = clauses
    both = "or" if first_verdict.startswith("neither") else "and"
    verdict = (
        f"{first_verdict} {first} {both} {second}"
        if first_verdict == second_verdict
        else f"{first_verdict} {first}, {second_verdict} {second}"
    )
    return f"{verdict[0].upper()}{verdict[1:]}."


def _text(interval: Interval, form: str) -> str:
    return f"{interval.mean:{form}} [{interval.low:{form}}, {interval.high:{form}}]"


# ---------------- curves over updates and over seconds


def curve_panels_html(runs: Mapping[str, RunRecords]) -> str:
    """Validation error, the headline's metric, then other measures, by updates and by time."""
    panels = []
    for title in (*_ERRORS, "Training loss"):
        for axis, what in (("step", "updates"), ("seconds", "training time, s")):
            lines = [line for name, run in runs.items() for line in _lines(name, run, title, axis)]
            if title == _TARGETED:
                lines.append(_target_line(runs, axis))
            unit = "nats" if title == "Training loss" else "%"
            panels.append(
                panel_html(f"{title}, by {what}", lines, Axis(what), Axis(unit, log=True))
            )
    panels += driven_panels(runs)
    legend = [(name, OPTIMIZERS[name][0]) for name in runs]
    legend.append(("muted", f"target of {100 * TARGET_ERROR:g} % validation error"))
    return panels_html(panels, legend=legend)


_TARGETED = "Validation error"
_ERRORS = {_TARGETED: "validation_accuracy", "Test error": "test_accuracy"}
_DRIVEN = (
    ("Learning rate", "learning_rates", False),
    ("Gradient norm", "gradient_norms", True),
)


def _has(runs: Mapping[str, Any], field: str) -> bool:
    return any(getattr(run, field) for run in runs.values())


def _lines(name: str, run: RunRecords, title: str, axis: str) -> list[Line]:
    label, x = OPTIMIZERS[name][0], [getattr(e, axis) for e in run.epochs]
    if title in _ERRORS:
        y = [100 * (1 - getattr(e, _ERRORS[title])) for e in run.epochs]
        return [Line(label, x, y, name)]
    lines = [Line(label, x, [e.train_loss for e in run.epochs], name)]
    if axis == "step" and run.losses:
        update_line = Line(f"{label}, one update", range(1, len(run.losses) + 1), run.losses, name)
        lines.insert(0, update_line._replace(faint=True))
    return lines


def _target_line(runs: Mapping[str, RunRecords], axis: str) -> Line:
    """The target of :func:`race_sentence`, across the panel."""
    x = [getattr(e, axis) for run in runs.values() for e in run.epochs]
    ends = [min(x), max(x)] if x else []
    target = 100 * TARGET_ERROR
    return Line(f"target, {target:g} %", ends, [target] * len(ends), "muted", level=True)


def _driven(runs: Mapping[str, Any], title: str, field: str, log: bool) -> str:
    lines = []
    for name, run in runs.items():
        values = getattr(run, field)
        x = list(range(1, len(values) + 1))
        color = name if name in OPTIMIZERS else "a"
        lines.append(Line(OPTIMIZERS.get(name, (name,))[0], x, values, color))
    return panel_html(f"{title}, by updates", lines, Axis("updates"), Axis(title.lower(), log=log))


def driven_panels(runs: Mapping[str, Any]) -> list[str]:
    """Panels of learning rate and gradient norm, for the runs that recorded them."""
    return [_driven(runs, *drawn) for drawn in _DRIVEN if _has(runs, drawn[1])]


# ---------------- the table for a terminal


def runs_table(runs: Mapping[str, RunRecords]) -> Table:
    """Updates and seconds to 3 % error, and the last epoch of each run."""
    head = ["optimizer", *TO_TARGET, "updates", "train loss", "test acc.", "train s", "compile s"]
    head = [name.replace(" ", "\n", 1) for name in head]  # 80 columns hold all of them
    rows = []
    for name, run in runs.items():
        last = run.epochs[-1]
        rows.append(
            [
                OPTIMIZERS[name][0],
                *at_target([run]),
                str(last.step),
                f"{last.train_loss:.4f}",
                f"{last.test_accuracy:.2%}",
                f"{last.seconds:.1f}",
                f"{run.compile_seconds:.1f}",
            ]
        )
        if run.skipped:
            rows.append([f"  {run.skipped} skipped: not finite"])
    return terminal_table("Result", head, rows, no_wrap=True)
