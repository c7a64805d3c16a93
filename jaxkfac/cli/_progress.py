"""Progress on standard error: a bar on a terminal, a line now and then elsewhere."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


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
