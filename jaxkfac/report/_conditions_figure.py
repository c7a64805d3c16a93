"""Condition number of each factor before and after clipping."""

import math
from collections.abc import Sequence
from typing import Any

from jaxkfac._text import shortened
from jaxkfac.report._families import FactorFamily, ends, families
from jaxkfac.report._spectra import SpectrumRecord
from jaxkfac.report._style import FIGURE_STYLE, MUTED, SIDES, svg_bytes

_SIDE_TEXT = {"A": "A", "G": "G", "diagonal": "diag."}


def conditions_figure(records: Sequence[SpectrumRecord]) -> bytes:
    """A line for each factor, from its condition number before clipping to that after.

    Depths of the same factor lie in one row, the first on top. A factor whose smallest
    eigenvalue is not positive starts from the right edge: its condition is infinite.

    Returns:
        The figure as SVG.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    rows = families(records, shared_once=True)
    known = [x for r in records for x in (r.condition_raw, r.condition_clipped) if x is not None]
    low, high = ends(known)
    infinite = any(record.condition_raw is None for record in records)
    last = math.ceil(math.log10(high) + 1e-9)
    edge = 10.0 ** (last + max(1, round(0.06 * last)))
    with mpl.rc_context(FIGURE_STYLE):
        depths = max((len(family.members) for family in rows), default=1)
        height = (0.16 + 0.02 * min(depths, 24)) * len(rows)
        figure = Figure(figsize=(9.2, height + 1.1), layout="constrained")
        axis = figure.subplots()
        for y, family in enumerate(rows):
            _draw(axis, y, family, edge)
        labels = [f"{shortened(f.title, 44)}   {_SIDE_TEXT[f.side]}" for f in rows]
        axis.set_yticks(range(len(rows)), labels, fontsize=7)
        for label, family in zip(axis.get_yticklabels(), rows, strict=True):
            label.set_color(SIDES[family.side])
        axis.set_ylim(len(rows) - 0.3, -0.7)
        axis.set_xscale("log")
        axis.set_xlim(10.0 ** math.floor(math.log10(low) - 0.02), edge * (2 if infinite else 1))
        decades = range(math.floor(math.log10(low)), last + 1)
        axis.set_xticks([10.0**k for k in decades[:: -(-len(decades) // 12)]])
        axis.xaxis.set_minor_locator(NullLocator())
        if infinite:
            axis.axvline(edge, color=MUTED, linewidth=0.6)
            axis.text(edge, -0.8, "infinite", ha="center", va="bottom", fontsize=7, color=MUTED)
        axis.set_xlabel("condition number")
        axis.set_axisbelow(True)
        axis.tick_params(axis="y", length=0)
        _legend(figure)
        return svg_bytes(figure)


def _draw(axis: Any, y: int, family: FactorFamily, edge: float) -> None:
    color, count = SIDES[family.side], len(family.members)
    for i, record in enumerate(family.members):
        if record.condition_clipped is None:  # clipping has nothing to raise to
            axis.text(0.01, y, "all zero", transform=axis.get_yaxis_transform(), fontsize=7,
                      color=MUTED, va="center")  # fmt: skip
            continue
        height = y + 0.5 * ((i + 0.5) / count - 0.5)
        before = edge if record.condition_raw is None else record.condition_raw
        after = record.condition_clipped
        axis.plot([before, after], [height] * 2, color=color, linewidth=0.6, alpha=0.45)
        marker = ">" if record.condition_raw is None else "o"
        axis.plot(before, height, marker, color=color, markersize=3.2, markerfacecolor="white",
                  markeredgewidth=0.8, clip_on=False)  # fmt: skip
        axis.plot(after, height, "o", color=color, markersize=2.6)


def _legend(figure: Any) -> None:
    from matplotlib.lines import Line2D

    dot = {"color": MUTED, "linestyle": "", "marker": "o", "markersize": 4}
    before = Line2D([], [], markerfacecolor="white", label="before clipping", **dot)
    after = Line2D([], [], label="after clipping", **dot)
    figure.legend(handles=[before, after], loc="outside lower center", ncols=2)
