"""Small drawings as plain SVG: a few lines, axes in round numbers, values under the pointer.

The script of the page reads positions back into values by what stands in ``data-x`` and
``data-y``; nothing else is stored twice.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from jaxkfac.jobs.report._page import OPTIMIZERS
from jaxkfac.jobs.report._race import RunRecords

_WIDTH, _HEIGHT = 320, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 8, 10, 34
_MOST_POINTS = 200  # of a line: there are fewer pixels
_LARGEST = 1e300  # beyond it the ends of an axis would not be finite
_MANY = 24  # panels, beyond which they scroll

Real = float | int


class Line(NamedTuple):
    """What is drawn in one colour.

    Attributes:
        label: For the pointer and the legend.
        x: Positions.
        y: Values; a gap where one is ``None``, not finite, or not positive on a logarithmic axis.
        color: Name of one of the page's colours: ``a``, ``g``, ``diagonal``, ``kfac``, ``adamw``,
            ``violet``, ``olive``, ``muted``.
        dots: Whether the values are not joined.
        faint: Whether it stands behind others.
        names: Of the values, for the pointer.
    """

    label: str
    x: Sequence[Real]
    y: Sequence[Real | None]
    color: str = "a"
    dots: bool = False
    faint: bool = False
    names: Sequence[str] = ()


class Axis(NamedTuple):
    """One direction of a panel.

    Attributes:
        label: What it is, with its unit.
        log: Whether it is logarithmic.
    """

    label: str
    log: bool = False


class _Scale(NamedTuple):
    """Values to positions, on a line or on a logarithmic one."""

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
    """A drawing with its title above it.

    Args:
        title: Of it.
        lines: Drawn in this order.
        x: To the right.
        y: Upwards.
        layer: By which the page's filter finds it.
        note: Below it.
    """
    drawn = [
        _thinned(line._replace(y=[_shown(w, y.log) if _shown(v, x.log) is not None else None
                                  for v, w in zip(line.x, line.y)]))
        for line in lines
    ]  # fmt: skip
    xs = [v for line in drawn for v, w in zip(line.x, line.y) if w is not None]
    ys = [w for line in drawn for w in line.y if w is not None]
    across = _scale(xs, x.log, _LEFT, _WIDTH - _RIGHT)
    up = _scale(ys, y.log, _HEIGHT - _BOTTOM, _TOP)
    parts = [*_grid(across, up), *(_path(line, across, up) for line in drawn)]
    if not ys:
        middle = (_LEFT + _WIDTH - _RIGHT) / 2
        parts.append(f'<text x="{middle}" y="90" text-anchor="middle">no value to draw</text>')
    parts.append(
        f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 4}" text-anchor="end">{escape(x.label)}</text>'
        f'<text transform="translate(9 {_TOP}) rotate(-90)" text-anchor="end">'
        f"{escape(y.label)}</text>"
    )
    found = f' data-layer="{escape(layer)}"' if layer else ""
    below = f'<p class="note">{escape(note)}</p>' if note else ""
    return (
        f'<figure class="panel"{found}><figcaption>{escape(title)}</figcaption>'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}" '
        f'data-x="{across.data}" data-y="{up.data}">{"".join(parts)}</svg>{below}</figure>'
    )


def panels_html(panels: Sequence[str], *, legend: Sequence[tuple[str, str]] = ()) -> str:
    """Panels beside and below each other, as there is room; many of them scroll.

    Args:
        panels: From :func:`panel_html`.
        legend: ``(colour, words)``.
    """
    keys = "".join(
        f'<span><i class="key {color}"></i>{escape(words)}</span>' for color, words in legend
    )
    many = " many" if len(panels) > _MANY else ""
    shown = f'<div class="legend">{keys}</div>' if keys else ""
    return f'{shown}<div class="panels{many}">{"".join(panels)}</div>'


def _shown(value: Real | None, log: bool) -> float | None:
    if value is None or (log and value <= 0) or not abs(value) <= _LARGEST:
        return None
    return float(value)


def _thinned(line: Line) -> Line:
    """At most ``_MOST_POINTS`` of them, evenly spread; the last one stays."""
    count = len(line.y)
    if count <= _MOST_POINTS:
        return line
    kept = [round(i * (count - 1) / (_MOST_POINTS - 1)) for i in range(_MOST_POINTS)]
    x, y, names = ([v[i] for i in kept] if len(v) else [] for v in (line.x, line.y, line.names))
    return line._replace(x=x, y=y, names=names)


def _scale(values: Sequence[Real], log: bool, start: Real, end: Real) -> _Scale:
    low, high = (min(values), max(values)) if values else (1.0, 10.0)
    if log:
        if high / low < 10:  # two powers of ten at the least
            low, high = 10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high) + 1e-9)
        else:
            low, high = low / 1.3, high * 1.3
    elif high - low <= 1e-12 * max(abs(high), abs(low), 1e-300):
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    return _Scale(low, high, log, start, end)


def _ticks(scale: _Scale, most: int) -> list[float]:
    if scale.log:
        first = math.ceil(math.log10(scale.low) - 1e-9)
        last = math.floor(math.log10(scale.high) + 1e-9)
        powers = range(first, last + 1)
        return [10.0**k for k in powers[:: max(1, -(-len(powers) // most))]]
    wanted = (scale.high - scale.low) / most
    power = 10.0 ** math.floor(math.log10(wanted))
    step = next((power * k for k in (1, 2, 5) if power * k >= wanted), 10 * power)
    first = math.ceil(scale.low / step - 1e-9)
    return [k * step for k in range(first, math.floor(scale.high / step + 1e-9) + 1)]


def _grid(across: _Scale, up: _Scale) -> Iterator[str]:
    for value in _ticks(up, 4):
        at = f"{up(value):.1f}"
        yield f'<line class="rule" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at}" y2="{at}"/>'
        yield f'<text x="{_LEFT - 4}" y="{at}" dy=".32em" text-anchor="end">{_words(value)}</text>'
    for value in _ticks(across, 4):
        at = f"{across(value):.1f}"
        low = _HEIGHT - _BOTTOM
        yield f'<line class="rule" x1="{at}" x2="{at}" y1="{low}" y2="{low + 3}"/>'
        yield f'<text x="{at}" y="{low + 13}" text-anchor="middle">{_words(value)}</text>'


def _words(value: Real) -> str:
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
        steps.append("h0")  # a line cap alone, which is a dot
    named = f' data-names="{escape(json.dumps(names))}"' if names else ""
    kind = " ".join(["line", line.color, *["dots"] * line.dots, *["faint"] * line.faint])
    return f'<path class="{kind}" data-label="{escape(line.label)}"{named} d="{"".join(steps)}"/>'


# ---------------- loss, error, learning rate and gradient norm of runs, over updates and over
# seconds


def curve_panels_html(runs: Mapping[str, RunRecords]) -> str:
    """Training loss and test error by updates and by training time, then what drove them."""
    ends = {
        "Training loss": [e.train_loss for run in runs.values() for e in run.epochs],
        "Test error": [],
    }
    panels = []
    for title in ends:
        for axis, what in (("step", "updates"), ("seconds", "training time, s")):
            lines = [line for name, run in runs.items() for line in _lines(name, run, title, axis)]
            unit = "nats" if title == "Training loss" else "%"
            panels.append(
                panel_html(f"{title}, by {what}", lines, Axis(what), Axis(unit, log=True))
            )
    panels += driven_panels(runs)
    legend = [(name, OPTIMIZERS[name][0]) for name in runs]
    return panels_html(panels, legend=legend)


_DRIVEN = (
    ("Learning rate", "learning_rates", False),
    ("Gradient norm", "gradient_norms", True),
)


def _has(runs: Mapping[str, Any], field: str) -> bool:
    return any(getattr(run, field) for run in runs.values())


def _lines(name: str, run: RunRecords, title: str, axis: str) -> list[Line]:
    label, x = OPTIMIZERS[name][0], [getattr(e, axis) for e in run.epochs]
    if title == "Test error":
        y: list[float | None] = [100 * (1 - e.test_accuracy) for e in run.epochs]
        return [Line(label, x, y, name)]
    lines = [Line(label, x, [e.train_loss for e in run.epochs], name)]
    if axis == "step" and run.losses:
        each = Line(f"{label}, one update", range(1, len(run.losses) + 1), run.losses, name)
        lines.insert(0, each._replace(faint=True))
    return lines


def _driven(runs: Mapping[str, Any], title: str, field: str, log: bool) -> str:
    lines = []
    for name, run in runs.items():
        values, last = getattr(run, field), len(run.losses)
        x = list(range(last - len(values) + 1, last + 1))
        color = name if name in OPTIMIZERS else "a"
        lines.append(Line(OPTIMIZERS.get(name, (name,))[0], x, values, color))
    return panel_html(f"{title}, by updates", lines, Axis("updates"), Axis("", log=log))


def driven_panels(runs: Mapping[str, Any]) -> list[str]:
    """Learning rate and gradient norm alone; none for runs that did not record them."""
    return [_driven(runs, *each) for each in _DRIVEN if _has(runs, each[1])]
