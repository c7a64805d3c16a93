"""Progress of a command, its current phase, and checks of its memory."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from jaxkfac._errors import JaxkfacError
from jaxkfac.memory import Duplicate, Stage, bytes_text, duplicate_report, resident_bytes

# ---------------- phases of a command, for errors


_NOTE = "while "


@contextlib.contextmanager
def phase(doing: str) -> Iterator[None]:
    """Attach a description of the block to an error that leaves it; blocks may be nested."""
    try:
        yield
    except Exception as error:
        error.add_note(_NOTE + doing)
        raise


def phases_of(error: BaseException) -> str:
    """The phases that an error has left, outermost first; empty without any."""
    notes = [note for note in getattr(error, "__notes__", []) if note.startswith(_NOTE)]
    return ": ".join(note.removeprefix(_NOTE) for note in reversed(notes))


# ---------------- progress on standard error: a bar on a terminal, about ten lines elsewhere


class Shown(NamedTuple):
    """Functions that report the progress of a run.

    Attributes:
        advance: ``advance(step, text)`` shows the current step; ``None`` keeps the last text.
        say: ``say(text)`` writes a permanent line.
    """

    advance: Callable[[int, str | None], None]
    say: Callable[[str], None]


@contextlib.contextmanager
def progress(name: str, total: int, *, start: int = 0, quiet: bool = False) -> Iterator[Shown]:
    """Show the progress of ``total`` steps from ``start`` on; shows nothing if ``quiet``."""
    if quiet:
        yield Shown(lambda step, text: None, lambda text: None)
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield Shown(_lines(name, total, start), lambda text: say(f"{name}: {text}"))
        return
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[text]}", style="dim"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(name, total=total, completed=start, text="compiling")
        news = ""

        def advance(step: int, text: str | None) -> None:
            nonlocal news
            news = news if text is None else text
            bar.update(task, completed=step, text=news)

        yield Shown(advance, lambda text: bar.console.print(f"{name}: {text}", highlight=False))


def time_left(seconds: float, updates: int, noun: str = "update") -> str:
    """Describe the remaining time, from a measured speed.

    Args:
        seconds: Seconds per update.
        updates: Number of remaining updates.
        noun: What is counted.

    Example:
        >>> time_left(0.42, 1710)
        'about 12 min left (0.42 s an update, 1710 updates)'
    """
    seconds_left = seconds * updates
    if seconds_left < 90:
        duration = f"{max(seconds_left, 1):.0f} s"
    elif seconds_left < 90 * 60:
        duration = f"{seconds_left / 60:.0f} min"
    else:
        duration = f"{seconds_left / 3600:.1f} h"
    speed = f"{seconds:.2f}" if seconds >= 0.1 else f"{seconds:.2g}"
    article = "an" if noun[0] in "aeiou" else "a"
    plural = "" if updates == 1 else "es" if noun.endswith("ch") else "s"
    return f"about {duration} left ({speed} s {article} {noun}, {updates} {noun}{plural})"


_MEASURED = 3  # steps to estimate the remaining time; one more before them warms up


def timed(shown: Shown, total: int, noun: str) -> Callable[[int, str | None], None]:
    """``advance`` of a progress display that says the remaining time once, when it is measured.

    Args:
        shown: The display.
        total: Number of steps.
        noun: What is counted.
    """
    times: list[tuple[int, float]] = []
    told = False

    def advance(step: int, text: str | None = None) -> None:
        nonlocal told
        shown.advance(step, text)
        if told or (times and step == times[-1][0]):
            return
        if times and step != times[-1][0] + 1:  # earlier work was read instead of done
            times.clear()
        times.append((step, time.monotonic()))
        (first, since), (last, now) = times[0], times[-1]
        if last - first >= _MEASURED and last < total:
            told = True
            shown.say(time_left((now - since) / (last - first), total - last, noun))

    return advance


def _lines(name: str, total: int, start: int) -> Callable[[int, str | None], None]:
    """Write about ten lines in all, so that a log stays readable."""
    shown = [start]

    def advance(step: int, text: str | None) -> None:
        if text is not None and (step == total or step - shown[0] >= total / 10):
            shown[0] = step
            say(f"{name} {step}/{total}  {text}")

    say(f"{name} {start}/{total}  compiling")
    return advance


def say(text: str) -> None:
    """Write a line to standard error and flush it."""
    print(text, file=sys.stderr, flush=True)


_SLOW = 3.0  # seconds


@contextlib.contextmanager
def said_if_slow(text: str, *, after: float | None = None, quiet: bool = False) -> Iterator[None]:
    """Say what the block is doing, once, if it takes longer than ``after`` seconds, by default 3.

    Blocks that compile are inside one of these, or begin a progress display, which says so. A
    ``quiet`` one says nothing: one process of several speaks for all.
    """
    if quiet:
        yield
        return
    lock, ended = threading.Lock(), False

    def is_time() -> None:
        with lock:
            if not ended:
                say(text)

    timer = threading.Timer(_SLOW if after is None else after, is_time)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        with lock:
            ended = True


def announced(name: str) -> Callable[[Any], contextlib.AbstractContextManager[None]]:
    """``announce(arrays)``: the context of a call that compiles for arrays of other shapes.

    The first shapes are left to the progress display, which begins with "compiling".
    """
    seen: list[Any] = []

    def announce(arrays: Any) -> contextlib.AbstractContextManager[None]:
        shapes = [x.shape for x in jax.tree.leaves(arrays)]
        is_new, is_first = shapes not in seen, not seen
        seen.extend([shapes] * is_new)
        if is_first or not is_new:
            return contextlib.nullcontext()
        return said_if_slow(f"{name}: compiling for a batch of another shape")

    return announce


# ---------------- main memory at the end of a command


def host_memory(stage: Stage) -> dict[str, int | None]:
    """``{"resident": now, "peak": most since the stage began}`` in bytes; ``None`` if unknown."""
    now, peak = resident_bytes(), stage.resident_peak
    if now is None or peak is None:
        return {"resident": now, "peak": None}
    return {"resident": now, "peak": max(now, peak.nbytes)}


# ---------------- duplicates in memory


PyTree = Any


class HeldTwiceError(JaxkfacError, RuntimeError):
    """An array of a run is in memory twice."""


def check_held_once(earlier: Sequence[jax.Array], **trees: PyTree) -> None:
    """Look for second copies of a run's arrays, in its trees and among all live arrays.

    Arrays that share a buffer, such as tied weights, count once, and constant arrays are ignored.
    Leaves of the optimizer may equal each other, since many start with the same values.

    Args:
        earlier: Arrays that existed before the run, which are ignored.
        **trees: Trees of the run by name; the optimizer's state is ``optimizer``.

    Raises:
        HeldTwiceError: names the holders of each copy, and its bytes.
    """
    report = duplicate_report(ignore=earlier, **trees)
    faults = [x for x in report.duplicates if _is_fault(x, set(trees))]
    if faults:
        lines = [f"  {' = '.join(x.names)}: {bytes_text(x.wasted_bytes)} too much" for x in faults]
        raise HeldTwiceError(
            "arrays are in memory twice as the run begins:\n"
            + "\n".join(lines)
            + "\nlet go of one holder before training; parameters that are meant to be one are "
            "tied in the model's config"
        )


def _is_fault(duplicate: Duplicate, trees: set[str]) -> bool:
    holders = {name.partition("/")[0] for name in duplicate.names}
    return bool(holders & trees) and holders != {"optimizer"}
