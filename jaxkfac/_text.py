"""Text: tables, names of alternatives, and how objects print themselves."""

from collections.abc import Collection, Sequence
from html import escape
from typing import Any

# ---------------- tables as text


WIDTH = 120  # columns of a page
_LEAST = 12  # of a first column that is cut


def aligned(
    rows: Sequence[Sequence[str]], *, width: int | None = None, words: Collection[int] = (0,)
) -> list[str]:
    """Lines of a table: columns of words to the left, of numbers to the right.

    Args:
        rows: Cells; a row that ends early is filled up with empty ones.
        width: Characters of a line. The first column is cut to it, at its front.
        words: Which columns are of words.
    """
    full = max(map(len, rows))
    cells = [[*row, *[""] * (full - len(row))] for row in rows]
    first, *others = (max(map(len, column)) for column in zip(*cells, strict=True))
    if width is not None:
        first = min(first, max(width - sum(others) - 2 * len(others), _LEAST))
    sizes = [first, *others]
    return [
        "  ".join(
            cell.ljust(size) if i in words else cell.rjust(size)
            for i, (cell, size) in enumerate(zip(row, sizes, strict=True))
        ).rstrip()
        for row in ([shortened(name, first), *rest] for name, *rest in cells)
    ]


def ruled(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    total: bool = False,
    width: int | None = WIDTH,
    words: Collection[int] = (0,),
) -> list[str]:
    """Lines of a table with a rule below its head.

    Args:
        head: Headings; line breaks in them are kept.
        rows: As for :func:`aligned`.
        total: Whether the last row is one, with a rule above it.
        width: As for :func:`aligned`.
        words: As for :func:`aligned`.
    """
    broken = [heading.split("\n") for heading in head]
    height = max(map(len, broken))
    lowered = [[""] * (height - len(parts)) + parts for parts in broken]
    heads = [list(line) for line in zip(*lowered, strict=True)]
    lines = aligned([*heads, *rows], width=width, words=words)
    rule = "-" * max(map(len, lines))
    lines.insert(height, rule)
    if total:
        lines.insert(-1, rule)
    return lines


def shortened(name: str, width: int) -> str:
    """The end of a name that is too long: it says which layer, the front which block."""
    return name if len(name) <= width else "…" + name[1 - width :]


def number(value: float | int | None) -> str:
    """Three significant digits, whole below 100,000; a dash for undefined or infinite."""
    if value is None:
        return "–"
    if isinstance(value, int) or 999.5 <= abs(value) < 99_999.5:
        return f"{value:,.0f}"
    return f"{value:.3g}"


# ---------------- how a result is displayed
#
# How a result shows itself: in one line where it is printed, as a table in a notebook.


def array_text(value: Any) -> str:
    """Dtype and shape of an array or of its ``ShapeDtypeStruct``; the ``repr`` of anything else.

    Example:
        >>> array_text(jnp.zeros((8, 3)))
        'float32[8, 3]'
    """
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None:
        return repr(value)
    return f"{dtype}[{', '.join(map(str, shape))}]"


def short_repr(self: Any) -> str:
    """The ``__repr__`` of a NamedTuple of arrays: the arrays would fill the screen."""
    parts = ", ".join(f"{name}={array_text(x)}" for name, x in self._asdict().items())
    return f"{type(self).__name__}({parts})"


def table_html(
    title: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    words: Collection[int] = (0,),
    notes: Sequence[str] = (),
) -> str:
    """A table for ``_repr_html_``, in the page's own colours; a long one scrolls.

    Args:
        title: Above it.
        head: Headings.
        rows: Cells, which are escaped.
        words: Which columns are of words: to the left, numbers to the right.
        notes: Lines below it.
    """

    def cells(tag: str, row: Sequence[str]) -> str:
        sides = ["left" if i in words else "right" for i in range(len(row))]
        return "".join(
            f'<{tag} style="text-align:{side};white-space:nowrap;padding:.1em .6em">'
            f"{escape(cell)}</{tag}>"
            for side, cell in zip(sides, row, strict=True)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    below = "".join(f'<div style="opacity:.75">{escape(note)}</div>' for note in notes)
    return (
        f'<div style="font-size:.9em"><strong>{escape(title)}</strong>'
        '<div style="max-height:30em;overflow:auto">'
        '<table style="border-collapse:collapse;font-variant-numeric:tabular-nums">'
        f"<thead><tr>{cells('th', head)}</tr></thead><tbody>{body}</tbody></table></div>"
        f"{below}</div>"
    )
