"""Progress on standard error: a bar on a terminal, a line now and then elsewhere."""

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Advance = Callable[[int, str], None]


@contextlib.contextmanager
def progress(name: str, total: int, *, start: int = 0) -> Iterator[Advance]:
    """``advance(step, text)`` shows how far a run of ``total`` steps has come."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(name, total, start)
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
        yield lambda step, text: bar.update(task, completed=step, text=text)


def _lines(name: str, total: int, start: int) -> Advance:
    """About ten lines in all, so that a log stays readable."""
    shown = [start]

    def advance(step: int, text: str) -> None:
        if step == total or step - shown[0] >= total / 10:
            shown[0] = step
            print(f"{name} {step}/{total}  {text}", file=sys.stderr, flush=True)

    print(f"{name} {start}/{total}  compiling", file=sys.stderr, flush=True)
    return advance
