"""How a result shows itself: in one line where it is printed, as a table in a notebook."""

from collections.abc import Collection, Sequence
from html import escape
from typing import Any


def array_text(value: Any) -> str:
    """Dtype and shape of an array, or of what stands for one; else its own words.

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
