"""What a command shows while it runs, what it was doing, and what it holds."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from jaxkfac._errors import JaxkfacError
from jaxkfac.memory import Duplicate, Stage, bytes_text, duplicate_report, resident_bytes

# ---------------- what a command was doing when memory ran out


_NOTE = "while "


@contextlib.contextmanager
def phase(doing: str) -> Iterator[None]:
    """Name what is done inside, on an error that leaves the block; blocks may be nested."""
    try:
        yield
    except Exception as error:
        error.add_note(_NOTE + doing)
        raise


def phases_of(error: BaseException) -> str:
    """The blocks that an error has left, outermost first; empty if there were none."""
    notes = [note for note in getattr(error, "__notes__", []) if note.startswith(_NOTE)]
    return ": ".join(note.removeprefix(_NOTE) for note in reversed(notes))


# ---------------- progress on standard error: a bar on a terminal, a line now and then elsewhere


class Shown(NamedTuple):
    """What a run says while it goes on.

    Attributes:
        advance: ``advance(step, text)`` shows how far it has come; without news text is ``None``.
        say: ``say(text)`` writes a line that stays.
    """

    advance: Callable[[int, str | None], None]
    say: Callable[[str], None]


@contextlib.contextmanager
def progress(name: str, total: int, *, start: int = 0, quiet: bool = False) -> Iterator[Shown]:
    """Show a run of ``total`` steps that has come to ``start``; nothing where it is ``quiet``."""
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


def time_left(seconds: float, updates: int) -> str:
    """A measured speed in words.

    Args:
        seconds: Of an update.
        updates: That are left.

    Example:
        >>> time_left(0.42, 1710)
        'about 12 min left (0.42 s an update, 1710 updates)'
    """
    left = seconds * updates
    if left < 90:
        words = f"{max(left, 1):.0f} s"
    elif left < 90 * 60:
        words = f"{left / 60:.0f} min"
    else:
        words = f"{left / 3600:.1f} h"
    speed = f"{seconds:.2f}" if seconds >= 0.1 else f"{seconds:.2g}"
    noun = "update" if updates == 1 else "updates"
    return f"about {words} left ({speed} s an update, {updates} {noun})"


def _lines(name: str, total: int, start: int) -> Callable[[int, str | None], None]:
    """About ten lines in all, so that a log stays readable."""
    shown = [start]

    def advance(step: int, text: str | None) -> None:
        if text is not None and (step == total or step - shown[0] >= total / 10):
            shown[0] = step
            say(f"{name} {step}/{total}  {text}")

    say(f"{name} {start}/{total}  compiling")
    return advance


def say(text: str) -> None:
    """A line on standard error, at once."""
    print(text, file=sys.stderr, flush=True)


# ---------------- main memory of a command at its end


def host_memory(stage: Stage) -> dict[str, int | None]:
    """``{"resident": now, "peak": the most since the stage began}``, bytes; ``None``: unknown."""
    now, peak = resident_bytes(), stage.resident_peak
    if now is None or peak is None:
        return {"resident": now, "peak": None}
    return {"resident": now, "peak": max(now, peak.nbytes)}


# ---------------- nothing that a run starts with is in memory twice


PyTree = Any


class HeldTwiceError(JaxkfacError, RuntimeError):
    """An array of a run has a second copy."""


def check_held_once(earlier: Sequence[jax.Array], **trees: PyTree) -> None:
    """Look for a second copy of what a run holds, in its trees and among all live arrays.

    Arrays that share a buffer, as tied weights do, are one; arrays of one constant say nothing.
    An optimizer's own leaves may be equal: it starts many of them with the same values.

    Args:
        earlier: Arrays that were there before the run: what others hold is not its fault.
        **trees: What the run holds, by name; the optimizer's state is ``optimizer``.

    Raises:
        HeldTwiceError: naming the holders of each copy, and its bytes.
    """
    report = duplicate_report(ignore=earlier, **trees)
    found = [x for x in report.duplicates if _is_fault(x, set(trees))]
    if found:
        lines = [f"  {' = '.join(x.names)}: {bytes_text(x.wasted_bytes)} too much" for x in found]
        raise HeldTwiceError(
            "arrays are in memory twice as the run begins:\n"
            + "\n".join(lines)
            + "\nlet go of one holder before training; parameters that are meant to be one are "
            "tied in the model's config"
        )


def _is_fault(duplicate: Duplicate, trees: set[str]) -> bool:
    holders = {name.partition("/")[0] for name in duplicate.names}
    return bool(holders & trees) and holders != {"optimizer"}
