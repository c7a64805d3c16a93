"""The page around the parts of a report, and the look of figures and tables."""

import base64
import importlib.metadata
import io
import platform
from collections.abc import Collection, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from rich.table import Table

from jaxkfac.plot import FIGURE_STYLE, INK, MUTED, RULE, SIDES

# ---------------- the page around the parts of a report: its look, by day and by night, and its
# little script


_FEW = 8  # layers, which need no filter


def page_html(title: str, lead: str, parts: Sequence[str], *, answer: Sequence[str] = ()) -> str:
    """A page that carries everything with it: no font, image, script or server from elsewhere.

    Where parts show many layers (``data-layer``) there is a field that leaves some out.

    Args:
        title: Heading.
        lead: One sentence below it.
        parts: As HTML.
        answer: What has come out, in sentences; before everything else.
    """
    look, script = (_part(name) for name in ("_page.css", "_page.js"))
    body = "\n".join(parts)
    said = f'<p class="answer">{escape(" ".join(answer))}</p>' if answer else ""
    field = (
        '<div class="filter"><input type="search" aria-label="layers to show" '
        'placeholder="show layers with … in their name"></div>'
        if body.count(" data-layer=") > _FEW
        else ""
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{look}</style></head>\n<body><main>\n"
        f'<h1>{escape(title)}</h1>\n<p class="lead">{escape(lead)}</p>\n{said}{field}\n'
        f'{body}\n</main><div id="tip"></div><script>{script}</script></body></html>\n'
    )


def _part(name: str) -> str:
    return files("jaxkfac.jobs.report").joinpath(name).read_text("utf-8")


# ---------------- the look of the figures of a report, and how they get into a page


__all__ = ["FIGURE_STYLE", "INK", "MUTED", "OPTIMIZERS", "RULE", "SIDES", "data_uri", "svg_bytes"]

OPTIMIZERS = {"kfac": ("K-FAC", "#1f5a92"), "adamw": ("AdamW", "#c8752d")}


def svg_bytes(figure: Any) -> bytes:
    """A figure as SVG, the same bytes for the same numbers."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def data_uri(svg: bytes) -> str:
    """An image that a page carries with it."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode("ascii")


# ---------------- pieces of a page: a table, a figure with its caption


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


# ---------------- tables that a terminal folds and styles; plain text is :mod:`jaxkfac._text`'s


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


# ---------------- which software made a result


def versions() -> dict[str, str]:
    """Versions of Python, of this library and of what decides its numbers."""
    found = {"python": platform.python_version()}
    for name in ("jaxkfac", "jax", "jaxlib", "flax", "optax", "numpy", "orbax-checkpoint"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
