"""Pieces of a page: a table, a figure with its caption."""

from collections.abc import Sequence
from html import escape

from jaxkfac.report._style import data_uri


def figure_html(svg: bytes, alternative: str, caption: str) -> str:
    """A drawing with the words that stand for it and the words below it."""
    image = f'<img alt="{escape(alternative)}" src="{data_uri(svg)}">'
    return f"<figure>{image}<figcaption>{escape(caption)}</figcaption></figure>"


def table_html(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, text: int, last: bool = False
) -> str:
    """``text`` leading columns, and the last one if asked, are words; the rest numbers.

    Rows of layers, whose first heading says so, are found by the page's filter.
    """

    def kind(column: int) -> str:
        if column == 0 and text > 1:
            return ' class="name"'
        words = column < text or (last and column == len(head) - 1)
        return "" if words else ' class="n"'

    top = "".join(f"<th{kind(i)}>{escape(cell)}</th>" for i, cell in enumerate(head))
    layers = bool(head) and head[0].startswith("layer")
    body = "".join(
        (f'<tr data-layer="{escape(row[0])}">' if layers else "<tr>")
        + "".join(f"<td{kind(i)}>{escape(c)}</td>" for i, c in enumerate(row))
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
    )
