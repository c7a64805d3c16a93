"""Which optimizer is first at a target, in updates and in seconds."""

import statistics
from collections.abc import Mapping, Sequence

from jaxkfac.report._records import EpochRecord, RunRecords
from jaxkfac.report._style import OPTIMIZERS

TARGET_ERROR = 0.03
"""Of the validation set."""
TO_TARGET = tuple(f"{unit} to {TARGET_ERROR:.0%}" for unit in ("updates", "s"))
"""Heads of the columns of :func:`at_target`."""
Runs = Mapping[str, Sequence[RunRecords]]


def reached(run: RunRecords, error: float = TARGET_ERROR) -> EpochRecord | None:
    """The first epoch after which the error on the validation set is at most ``error``."""
    known = (epoch for epoch in run.epochs if epoch.validation_accuracy is not None)
    return next((x for x in known if 1 - x.validation_accuracy <= error + 1e-9), None)


def at_target(runs: Sequence[RunRecords]) -> tuple[str, str]:
    """Updates and seconds to the target: of several runs the median and the range."""
    found = [epoch for run in runs if (epoch := reached(run)) is not None]
    if len(found) < len(runs):
        word = f"{len(found)} of {len(runs)}" if found else "never"
        return word, word
    return interval([float(e.step) for e in found], ".0f"), interval(
        [e.seconds for e in found], ".1f"
    )


def interval(numbers: Sequence[float], form: str) -> str:
    """The median, and of several numbers the range."""
    middle = format(statistics.median(numbers), form)
    if len(numbers) == 1:
        return middle
    return f"{middle} ({min(numbers):{form}} to {max(numbers):{form}})"


def race_sentence(runs: Runs) -> str:
    """Who is faster to the target: in updates, and in seconds.

    Args:
        runs: For each optimizer its runs, one for each seed.
    """
    known = {n: found for n, found in runs.items() if found and found[0].epochs}
    goal = f"{TARGET_ERROR:.0%} error on the validation images"
    parts, medians = [], {}
    for name, found in known.items():
        epochs = [epoch for run in found if (epoch := reached(run)) is not None]
        label, seeds = OPTIMIZERS[name][0], f" (medians of {len(found)} seeds)"
        if len(epochs) < len(found):
            often = f" in {len(found) - len(epochs)} of {len(found)} seeds" if epochs else ""
            parts.append(f"{label} does not reach {goal}{often}")
            continue
        steps = statistics.median(float(epoch.step) for epoch in epochs)
        seconds = statistics.median(epoch.seconds for epoch in epochs)
        medians[name] = steps, seconds
        words = f"{label} reaches {goal} after {steps:.0f} updates and {seconds:.1f} s"
        parts.append(words + (seeds if len(found) > 1 else ""))
    said = "; ".join(parts) + "."
    if len(medians) < 2 or len(medians) < len(known):
        return said
    firsts = [_first({name: x[i] for name, x in medians.items()}) for i in (0, 1)]
    if firsts[0] == firsts[1]:
        return f"{said} {_faster(firsts[0])} in updates and in seconds."
    return f"{said} {_faster(firsts[0])} in updates, {_faster(firsts[1])} in seconds."


def _first(numbers: Mapping[str, float]) -> str | None:
    least = [name for name, x in numbers.items() if x == min(numbers.values())]
    return OPTIMIZERS[least[0]][0] if len(least) == 1 else None


def _faster(name: str | None) -> str:
    return "None is faster" if name is None else f"{name} is faster"
