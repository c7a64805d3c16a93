"""Building blocks of the report pages: style, tables, captions and small SVG drawings."""

import contextlib
import importlib.metadata
import io
import json
import math
import platform
from collections.abc import Collection, Iterator, Sequence
from html import escape
from importlib.resources import files
from typing import Any, NamedTuple

from rich.table import Table

from jaxkfac._text import number, shortened
from jaxkfac.plot import FIGURE_STYLE, INK, MUTED, RULE, SIDES

# ---------------- the frame of a page: style sheets by day and by night, and its script


_FEW = 8  # largest number of layers without a filter


def page_html(title: str, lead: str, sections: Sequence[str], *, answer: Sequence[str] = ()) -> str:
    """A self-contained page: it loads no font, image, script or data from elsewhere.

    If the sections show many layers (``data-layer``), the page has a field to filter them by name,
    above the first of these sections.

    Args:
        title: Heading.
        lead: One sentence below the heading.
        sections: Sections, as HTML.
        answer: Sentences on the result, placed first.
    """
    look, script = (_packaged_text(name) for name in ("_page.css", "_page.js"))
    answer_html = f'<p class="answer">{escape(" ".join(answer))}</p>' if answer else ""
    field = (
        '<div class="filter"><input type="search" aria-label="layers to show" '
        'placeholder="show layers with … in their name"></div>'
        if sum(section.count(" data-layer=") for section in sections) > _FEW
        else ""
    )
    first = next((i for i, section in enumerate(sections) if " data-layer=" in section), 0)
    body = "\n".join([*sections[:first], field, *sections[first:]])
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{look}</style></head>\n<body><main>\n"
        f'<h1>{escape(title)}</h1>\n<p class="lead">{escape(lead)}</p>\n{answer_html}\n'
        f'{body}\n</main><div id="tip"></div><script>{script}</script></body></html>\n'
    )


def _packaged_text(name: str) -> str:
    return files("jaxkfac.jobs.report").joinpath(name).read_text("utf-8")


# ---------------- figures in a page


__all__ = ["INK", "MUTED", "OPTIMIZERS", "RULE", "SIDES", "new_figure", "svg_bytes"]

OPTIMIZERS = {"kfac": ("K-FAC", "#1f5a92"), "adamw": ("AdamW", "#c8752d")}


@contextlib.contextmanager
def new_figure(height: float) -> Iterator[Any]:
    """A figure as wide as a page, in its style, with a height in inches."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(FIGURE_STYLE):
        yield Figure(figsize=(9.2, height), layout="constrained")


def svg_bytes(figure: Any) -> bytes:
    """A figure as SVG, with the same bytes for the same numbers."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


# ---------------- tables


def table_html(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, text: int, last: bool = False
) -> str:
    """A table with ``text`` leading text columns and numbers after them.

    ``last`` makes the last column text too. The page's filter finds rows of layers, which the first
    heading marks.
    """

    def kind(column: int) -> str:
        if column == 0 and text > 1:
            return ' class="name"'
        is_text = column < text or (last and column == len(head) - 1)
        return "" if is_text else ' class="n"'

    top = "".join(f"<th{kind(i)}>{escape(cell)}</th>" for i, cell in enumerate(head))
    layers = bool(head) and head[0].startswith("layer")

    def opening(row: Sequence[str]) -> str:
        if layers:
            return f'<tr data-layer="{escape(row[0])}">'
        return "<tr>" if any(row[1:]) else '<tr class="group">'

    body = "".join(
        opening(row)
        + "".join(f"<td{kind(i)}>{escape(c)}</td>" for i, c in enumerate(row))
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
    )


# ---------------- tables for the terminal; :mod:`jaxkfac._text` has those in plain text


def terminal_table(
    title: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]] = (),
    *,
    text_columns: Collection[int] = (0,),
    no_wrap: bool = False,
    total: bool = False,
) -> Table:
    """A table with text columns on the left-hand side and numbers right-aligned.

    Args:
        title: Title above the table.
        head: Headings.
        rows: Cells; short rows are padded. A column without any is left out.
        text_columns: Indices of the text columns, which are folded in a narrow terminal.
        no_wrap: Whether to fold nothing.
        total: Whether the last row is a total.
    """
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    columns = filled_columns(head, rows)
    for i in columns:
        justify = "left" if i in text_columns else "right"
        overflow = "fold" if i in text_columns else "ellipsis"
        table.add_column(head[i], justify=justify, overflow=overflow, no_wrap=no_wrap)
    for i, row in enumerate(rows, 1):
        cells = [row[column] for column in columns if column < len(row)]
        table.add_row(*cells, style="bold" if total and i == len(rows) else None)
    return table


def filled_columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    """Columns with a cell in some row; all of them in a table without rows."""
    longest = [any(len(row) > i and row[i] for row in rows) for i in range(len(head))]
    return [i for i, filled in enumerate(longest) if filled or not rows]


# ---------------- versions of the software


def versions() -> dict[str, str]:
    """Versions of Python, of this library and of the packages that affect its numbers."""
    installed = {"python": platform.python_version()}
    for name in ("jaxkfac", "jax", "jaxlib", "flax", "optax", "numpy"):
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed[name] = "not installed"
    return installed


# ---------------- small SVG drawings
#
# Small SVG drawings: a few lines, axes with round numbers, values under the pointer.
#
# The page's script converts positions back into values with ``data-x`` and ``data-y``, so no value
# is
# stored twice.


_WIDTH, _HEIGHT = 320, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 8, 10, 34
_NAME_HEIGHT, _NAME_WIDTH, _LETTER = 12, 160, 6.1  # of names below a panel
LEAST_POINTS = 5  # of the longest line of a drawing; fewer are a table
_MOST_POINTS = 200  # points of a line; a panel has hardly more pixels
LINE_COLORS = ("a", "adamw", "diagonal", "g", "violet", "olive")  # of lines beside each other
_LARGEST = 1e300  # beyond it the ends of an axis would not be finite
_MANY = 24  # number of panels beyond which they scroll

Real = float | int


class Line(NamedTuple):
    """A line of one colour.

    Attributes:
        label: Name for the pointer and the legend.
        x: Positions.
        y: Values; ``None``, a non-finite value, or a non-positive one on a log axis leaves a gap.
        color: Name of one of the page's colours: ``a``, ``g``, ``diagonal``, ``kfac``, ``adamw``,
            ``violet``, ``olive``, ``muted``.
        dots: Whether to draw dots instead of a joined line.
        faint: Whether to draw it in the background.
        names: Names of the values, for the pointer.
        level: Whether it is a level drawn across the panel, rather than values.
    """

    label: str
    x: Sequence[Real]
    y: Sequence[Real | None]
    color: str = "a"
    dots: bool = False
    faint: bool = False
    names: Sequence[str] = ()
    level: bool = False


class Axis(NamedTuple):
    """One axis of a panel.

    Attributes:
        label: Quantity and unit.
        log: Whether it is logarithmic.
        names: For the horizontal axis: names of the positions 0, 1 and so on, written upright
            below it in place of numbers. Where there are too many, every second or third is.
    """

    label: str
    log: bool = False
    names: Sequence[str] = ()


class _Scale(NamedTuple):
    """Maps values to positions, linearly or logarithmically."""

    low: Real
    high: Real
    log: bool
    start: Real
    end: Real

    def __call__(self, value: Real) -> float:
        low, high, value = (
            (math.log10(v) if self.log else v) for v in (self.low, self.high, value)
        )
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    @property
    def data(self) -> str:
        return escape(json.dumps([self.low, self.high, int(self.log), self.start, self.end]))


def panel_html(
    title: str, lines: Sequence[Line], x: Axis, y: Axis, *, layer: str = "", note: str = ""
) -> str:
    """A drawing with its title above it, or a table if no line has as many as five values.

    Args:
        title: Title of the drawing.
        lines: Lines, drawn in this order.
        x: Horizontal axis.
        y: Vertical axis.
        layer: Name by which the page's filter finds the panel.
        note: Text below the drawing.
    """
    drawn = [
        _thinned(line._replace(y=[_shown(w, y.log) if _shown(v, x.log) is not None else None
                                  for v, w in zip(line.x, line.y)]))
        for line in lines
    ]  # fmt: skip
    xs = [v for line in drawn for v, w in zip(line.x, line.y) if w is not None]
    ys = [w for line in drawn for w in line.y if w is not None]
    layer_attribute = f' data-layer="{escape(layer)}"' if layer else ""
    below = f'<p class="note">{escape(note)}</p>' if note else ""
    opening = f'<figure class="panel"{layer_attribute}><figcaption>{escape(title)}</figcaption>'
    counts = [sum(w is not None for w in line.y) for line in drawn if not line.level]
    if 0 < max(counts, default=0) < LEAST_POINTS:
        return f"{opening}{_few_values(drawn, x, y)}{below}</figure>"
    across = _scale(xs, x.log, _LEFT, _WIDTH - _RIGHT)
    up = _scale(ys, y.log, _HEIGHT - _BOTTOM, _TOP)
    if x.names:
        across = _Scale(-0.5, len(x.names) - 0.5, False, _LEFT, _WIDTH - _RIGHT)
    shapes = [*_grid(across, up, x.names), *(_path(line, across, up) for line in drawn)]
    if not ys:
        middle = (_LEFT + _WIDTH - _RIGHT) / 2
        shapes.append(f'<text x="{middle}" y="90" text-anchor="middle">no value to draw</text>')
    height = _HEIGHT + min(_NAME_WIDTH, round(_LETTER * max(map(len, x.names), default=0)))
    shapes.append(
        f'<text x="{_WIDTH - _RIGHT}" y="{height - 4}" text-anchor="end">{escape(x.label)}</text>'
        f'<text transform="translate(9 {_TOP}) rotate(-90)" text-anchor="end">'
        f"{escape(y.label)}</text>"
    )
    return (
        f'{opening}<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(title)}" '
        f'data-x="{across.data}" data-y="{up.data}">{"".join(shapes)}</svg>{below}</figure>'
    )


def _few_values(lines: Sequence[Line], x: Axis, y: Axis) -> str:
    """The values of lines that are too short to be drawn, with a row for each."""
    rows = [
        [line.label, line.names[i] if len(line.names) else number(a), number(b)]
        for line in lines
        if not line.level
        for i, (a, b) in enumerate(zip(line.x, line.y))
        if b is not None
    ]
    return table_html(["line", x.label, y.label or "value"], rows, text=2 if x.names else 1)


def panels_html(panels: Sequence[str], *, legend: Sequence[tuple[str, str]] = ()) -> str:
    """Arrange panels in rows that fit the window; many panels scroll.

    Args:
        panels: Panels from :func:`panel_html`.
        legend: ``(color, text)`` for each entry.
    """
    keys = "".join(
        f'<span><i class="key {color}"></i>{escape(text)}</span>' for color, text in legend
    )
    many = " many" if len(panels) > _MANY else ""
    shown = f'<div class="legend">{keys}</div>' if keys else ""
    return f'{shown}<div class="panels{many}">{"".join(panels)}</div>'


def _shown(value: Real | None, log: bool) -> float | None:
    if value is None or (log and value <= 0) or not abs(value) <= _LARGEST:
        return None
    return float(value)


def _thinned(line: Line) -> Line:
    """At most ``_MOST_POINTS`` evenly spaced points of a line, including its last."""
    count = len(line.y)
    if count <= _MOST_POINTS:
        return line
    indices = [round(i * (count - 1) / (_MOST_POINTS - 1)) for i in range(_MOST_POINTS)]
    x, y, names = ([v[i] for i in indices] if len(v) else [] for v in (line.x, line.y, line.names))
    return line._replace(x=x, y=y, names=names)


def _scale(values: Sequence[Real], log: bool, start: Real, end: Real) -> _Scale:
    low, high = (min(values), max(values)) if values else (1.0, 10.0)
    if log:
        low, high = low / 1.3, high * 1.3
    elif high - low <= 1e-12 * max(abs(high), abs(low), 1e-300):
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    return _Scale(low, high, log, start, end)


def _ticks(scale: _Scale, most: int) -> list[float]:
    if scale.log:
        first = math.ceil(math.log10(scale.low) - 1e-9)
        last = math.floor(math.log10(scale.high) + 1e-9)
        powers = [10.0**k for k in range(first, last + 1)]
        if len(powers) > 2:
            return powers[:: -(-len(powers) // most)]
        finer = [k * 10.0**power for power in range(first - 1, last + 1) for k in (1, 2, 5)]
        inside = [value for value in finer if scale.low <= value <= scale.high]
        if len(inside) > 1:
            return inside
    least_step = (scale.high - scale.low) / most
    power = 10.0 ** math.floor(math.log10(least_step))
    step = next((power * k for k in (1, 2, 5) if power * k >= least_step), 10 * power)
    first = math.ceil(scale.low / step - 1e-9)
    return [k * step for k in range(first, math.floor(scale.high / step + 1e-9) + 1)]


def _grid(across: _Scale, up: _Scale, names: Sequence[str]) -> Iterator[str]:
    for value in _ticks(up, 4):
        at = f"{up(value):.1f}"
        yield f'<line class="rule" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at}" y2="{at}"/>'
        yield f'<text x="{_LEFT - 4}" y="{at}" dy=".32em" text-anchor="end">{_tick(value)}</text>'
    low = _HEIGHT - _BOTTOM
    most = int((_WIDTH - _RIGHT - _LEFT) / _NAME_HEIGHT)
    for value in range(0, len(names), max(1, -(-len(names) // most))):
        at, name = f"{across(value):.1f}", shortened(names[value], int(_NAME_WIDTH / _LETTER))
        yield f'<line class="rule" x1="{at}" x2="{at}" y1="{low}" y2="{low + 3}"/>'
        yield (
            f'<text transform="translate({at} {low + 6}) rotate(-90)" dy=".32em" '
            f'text-anchor="end">{escape(name)}</text>'
        )
    for value in _ticks(across, 4) if not names else ():
        at = f"{across(value):.1f}"
        yield f'<line class="rule" x1="{at}" x2="{at}" y1="{low}" y2="{low + 3}"/>'
        yield f'<text x="{at}" y="{low + 13}" text-anchor="middle">{_tick(value)}</text>'


def _tick(value: Real) -> str:
    if value and not 1e-3 <= abs(value) < 1e5:
        digits, power = f"{value:.1e}".split("e")
        return f"{digits.removesuffix('.0')}e{int(power)}"
    return f"{value:.12g}"


def _path(line: Line, across: _Scale, up: _Scale) -> str:
    steps, joined, names = [], False, []
    for i, (x, y) in enumerate(zip(line.x, line.y)):
        if y is None:
            joined = False
            continue
        at = f"{across(x):.1f} {up(y):.1f}"
        steps.append(f"M{at}h0" if line.dots else f"{'L' if joined else 'M'}{at}")
        names += [line.names[i]] if len(line.names) else []
        joined = True
    if not steps:
        return ""
    if len(steps) == 1 and not line.dots:
        steps.append("h0")  # a zero-length stroke, which its line cap shows as a dot
    named = f' data-names="{escape(json.dumps(names))}"' if names else ""
    kind = " ".join(["line", line.color, *["dots"] * line.dots, *["faint"] * line.faint])
    return f'<path class="{kind}" data-label="{escape(line.label)}"{named} d="{"".join(steps)}"/>'
