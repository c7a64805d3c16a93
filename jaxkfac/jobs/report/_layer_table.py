"""Tables of layers for the terminal, whose names are shortened to what tells them apart."""

import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from jaxkfac.jobs.report._page import filled_columns, terminal_table

# ---------------- names within a width


_GAP = "…"
_KERNEL = "kernel"  # the last part of most names


def distinct_names(names: Collection[str], width: int) -> dict[str, str]:
    """``{name: name of at most width characters}``, without parts that other names have too.

    A name of several parts loses some of them, never a piece of one, and the rest still tells it
    apart from all others. If that is impossible within ``width``, the shortest such name is broken
    into lines between its parts.
    """
    shorter = {name: _shorter(name) for name in names}
    counts = Counter(text for texts in shorter.values() for text in texts)
    result = {}
    for name, texts in shorter.items():
        distinct = sorted(text for text in texts if counts[text] == 1 and text not in shorter)
        fitting = [text for text in distinct if len(text) <= width]
        if len(name) <= width:
            result[name] = name
        elif fitting:  # a gap in front or inside says more than one at the end
            result[name] = max(fitting, key=lambda text: (not text.endswith(_GAP), len(text)))
        else:
            result[name] = broken_name(min((*distinct, name), key=len), width)
    return result


def _shorter(name: str) -> set[str]:
    """Every way to leave out parts in a row, and the last one if it is a kernel's."""
    parts = name.split("/")
    is_kernel = len(parts) > 1 and parts[-1] == _KERNEL
    texts = {"/".join(parts[:-1])} if is_kernel else set()
    for rest in (parts, parts[:-1]) if is_kernel else (parts,):
        for start, stop in itertools.combinations(range(len(rest) + 1), 2):
            if stop - start < len(rest):
                texts.add("/".join([*rest[:start], _GAP, *rest[stop:]]))
    return texts


def broken_name(name: str, width: int) -> str:
    """Lines of at most ``width`` characters, or of one part where that is longer."""
    lines = [""]
    for part in re.findall(r"[^/ ]+[/ ]?", name):
        if lines[-1] and len(lines[-1] + part.rstrip()) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.rstrip() for line in lines)


# ---------------- the table


class TableOfLayers(NamedTuple):
    """A table with a row for each layer, laid out when the width of the terminal is known.

    Attributes:
        title: Title above the table.
        head: Headings; the first column holds names of layers.
        rows: Cells.
        text_columns: Indices of the text columns.
        total: Whether the last row is a total.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: Collection[int] = (0,)
    total: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.at(options.max_width)

    def at(self, width: int) -> Table:
        """The table for a terminal of this many columns, without those that have no cell."""
        filled = filled_columns(self.head, self.rows)
        if len(filled) < len(self.head):
            head, *rows = ([row[i] for i in filled] for row in (self.head, *self.rows))
            words = [filled.index(i) for i in self.text_columns if i in filled]
            return self._replace(head=head, rows=rows, text_columns=words).at(width)
        columns = [*zip(self.head, *self.rows, strict=True)]
        widths = [_longest(line for cell in x for line in cell.split("\n")) for x in columns]
        words = [_longest(word for cell in x for word in cell.split()) for x in columns]
        names = [row[0] for row in self.rows]
        room = width - len(columns)  # a space after each column
        narrow = distinct_names(names, 0).values()
        whole = _longest(name.replace("\n", "") for name in narrow)
        least = whole if whole + sum(words[1:]) <= room else _longest(_lines(narrow))
        for i in sorted(range(1, len(columns)), key=lambda i: words[i] - widths[i]):
            if sum(widths[1:]) + min(least, widths[0]) > room:  # break between words
                widths[i] = words[i]
        widths[0] = max(min(widths[0], room - sum(widths[1:])), min(least, widths[0]))
        shown = distinct_names(names, widths[0])
        rows = [[shown[row[0]], *row[1:]] for row in self.rows]
        table = terminal_table(
            self.title, self.head, rows, text_columns=self.text_columns, total=self.total
        )
        table.padding = (0, 1, 0, 0)
        for column, column_width in zip(table.columns, widths, strict=True):
            column.width = column_width
        return table


def _lines(names: Iterable[str]) -> Iterator[str]:
    return (line for name in names for line in name.split("\n"))


def _longest(texts: Iterable[str]) -> int:
    return max(map(len, texts), default=0)
