"""Tables as text."""

from collections.abc import Sequence

WIDTH = 120  # columns of a page
_LEAST = 12  # of a first column that is cut


def aligned(rows: Sequence[Sequence[str]], *, width: int | None = None) -> list[str]:
    """Lines of a table: the first column to the left, the others to the right.

    Args:
        rows: Cells; a row that ends early is filled up with empty ones.
        width: Characters of a line. The first column is cut to it, at its front.
    """
    full = max(map(len, rows))
    cells = [[*row, *[""] * (full - len(row))] for row in rows]
    first, *others = (max(map(len, column)) for column in zip(*cells, strict=True))
    if width is not None:
        first = min(first, max(width - sum(others) - 2 * len(others), _LEAST))
    return [
        "  ".join(
            [shortened(name, first).ljust(first)]
            + [cell.rjust(size) for cell, size in zip(rest, others, strict=True)]
        ).rstrip()
        for name, *rest in cells
    ]


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
