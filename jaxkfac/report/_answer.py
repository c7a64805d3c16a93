"""What has come out of a run, in sentences: who won, by how much, in updates and in seconds."""

import math
from collections.abc import Mapping

from jaxkfac.report._records import RunRecords
from jaxkfac.report._style import OPTIMIZERS

_Z = 1.959963984540054  # 95 %


def train_answer(runs: Mapping[str, RunRecords], num_test: int | None = None) -> list[str]:
    """Sentences on the runs; the better one on held-out examples is the first.

    Args:
        runs: ``{"kfac" or "adamw": records}``, with epochs.
        num_test: How many examples are held out; without it there is no interval.
    """
    known = {name: run for name, run in runs.items() if run.epochs}
    if len(known) < 2:
        return [_alone(name, run, num_test) for name, run in known.items()]
    best, other = sorted(known, key=lambda name: -known[name].epochs[-1].test_accuracy)[:2]
    return [_held_out(known, best, other, num_test), _loss(known)]


def wilson(right: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share ``right`` of ``count``."""
    middle = right + _Z**2 / (2 * count)
    half = _Z * math.sqrt(right * (1 - right) / count + _Z**2 / (4 * count**2))
    return (middle - half) / (1 + _Z**2 / count), (middle + half) / (1 + _Z**2 / count)


def newcombe(first: float, second: float, count: int) -> tuple[float, float]:
    """Newcombe's 95 % interval of the difference of two shares, each of ``count`` examples.

    Of the same examples the true interval is narrower, since both are often right together.

    References:
        Newcombe, Interval estimation for the difference between independent proportions, 1998.
    """
    (low1, high1), (low2, high2) = wilson(first, count), wilson(second, count)
    low = first - second - math.hypot(first - low1, high2 - second)
    return low, first - second + math.hypot(high1 - first, second - low2)


def _alone(name: str, run: RunRecords, num_test: int | None) -> str:
    last = run.epochs[-1]
    ends = ""
    if num_test:
        low, high = wilson(last.test_accuracy, num_test)
        ends = f" (95 % interval {low:.1%} to {high:.1%})"
    return (
        f"{OPTIMIZERS[name][0]} is right on {last.test_accuracy:.1%}{ends} of the held-out "
        f"examples after {last.step:,} updates and {last.seconds:.1f} s of training."
    )


def _held_out(runs: Mapping[str, RunRecords], best: str, other: str, num_test: int | None) -> str:
    first, second = (runs[name].epochs[-1].test_accuracy for name in (best, other))
    names = OPTIMIZERS[best][0], OPTIMIZERS[other][0]
    found = f"{first:.1%} against {second:.1%} of the held-out examples"
    if num_test is None:
        return f"{names[0]} is right on {found} ({names[1]})."
    low, high = newcombe(first, second, num_test)
    points = (
        f"{100 * (first - second):.1f} points, 95 % interval {100 * low:.1f} to {100 * high:.1f}"
    )
    if low <= 0:
        return (
            f"On held-out examples neither has won: {names[0]} {first:.1%}, {names[1]} "
            f"{second:.1%} ({points}, which contains zero)."
        )
    return f"{names[0]} has won on held-out examples: {found} for {names[1]} ({points})."


def _loss(runs: Mapping[str, RunRecords]) -> str:
    """When the one with the lower loss had come to where the other ended."""
    low, high = sorted(runs, key=lambda name: runs[name].epochs[-1].train_loss)[:2]
    end = runs[high].epochs[-1]
    epochs = runs[low].epochs
    reached = next(epoch for epoch in epochs if epoch.train_loss <= end.train_loss)
    names = OPTIMIZERS[low][0], OPTIMIZERS[high][0]
    steps = f"{reached.step:,} updates where {names[1]} took {end.step:,}"
    times = f"{reached.seconds:.1f} s where it took {end.seconds:.1f} s"
    return (
        f"{names[0]} ends with the lower training loss, {epochs[-1].train_loss:.3g} against "
        f"{end.train_loss:.3g} nats: it was where {names[1]} ends after {steps}, and {times}."
    )
