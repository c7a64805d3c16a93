"""Tables that a terminal folds and styles; plain text is :mod:`jaxkfac._text`'s."""

from collections.abc import Collection, Sequence

from rich.table import Table


def terminal_table(
    title: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]] = (),
    *,
    words: Collection[int] = (0,),
    no_wrap: bool = False,
    total: bool = False,
) -> Table:
    """Columns of words to the left, of numbers to the right.

    Args:
        title: Above it.
        head: Headings.
        rows: Cells; a row that ends early is filled up.
        words: Which columns are of words. They are folded where the terminal is narrow.
        no_wrap: Whether nothing is folded.
        total: Whether the last row is one.
    """
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for i, name in enumerate(head):
        justify = "left" if i in words else "right"
        overflow = "fold" if i in words else "ellipsis"
        table.add_column(name, justify=justify, overflow=overflow, no_wrap=no_wrap)
    for i, row in enumerate(rows, 1):
        table.add_row(*row, style="bold" if total and i == len(rows) else None)
    return table
