"""Small multiples of spectra: one panel for each factor of each layer."""

import math
from collections.abc import Sequence
from typing import Any

from jaxkfac.report._families import families
from jaxkfac.report._spectra import SpectrumRecord
from jaxkfac.report._style import FIGURE_STYLE, MUTED, SIDES, svg_bytes

COLUMNS = 4
_MOST_LINES, MOST_POINTS = 16, 256  # a page with each point of a large model has many megabytes
_TITLES = {"A": "A, inputs", "G": "G, output gradients", "diagonal": "diagonal"}


def spectra_figure(records: Sequence[SpectrumRecord]) -> bytes:
    """Eigenvalues over their rank, before clipping as dots and after it as lines.

    Slices of a stacked layer, and layers whose names differ in a number, are drawn in one panel,
    later ones lighter: 16 of them, and 256 eigenvalues of each, where there are more. An input
    factor that several layers share is drawn once. Values that are not positive cannot be drawn
    on a logarithmic axis and are counted in the panel instead.

    Returns:
        The figure as SVG.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    found = panels(records)
    with mpl.rc_context(FIGURE_STYLE):
        rows = max(math.ceil(len(found) / COLUMNS), 1)
        figure = Figure(figsize=(9.2, 1.75 * rows + 0.3), layout="constrained")
        axes = figure.subplots(rows, COLUMNS, squeeze=False)
        for axis in axes.flat[len(found) :]:
            axis.set_axis_off()
        for axis, (title, members) in zip(axes.flat, found, strict=False):
            _draw(axis, title, members)
        figure.supxlabel("rank of the eigenvalue", fontsize=9)
        figure.supylabel("eigenvalue", fontsize=9)
        return svg_bytes(figure)


def panels(
    records: Sequence[SpectrumRecord], *, apart: bool = False
) -> list[tuple[str, list[SpectrumRecord]]]:
    """Titles and depths of the factors that are stored under their own layer's name."""
    order = {"A": 0, "G": 0, "diagonal": 1}
    found = sorted(
        families(records, shared_once=True, apart=apart), key=lambda family: order[family.side]
    )
    return [(f"{family.title}\n{_TITLES[family.side]}", family.members) for family in found]


def _draw(axis: Any, title: str, members: list[SpectrumRecord]) -> None:
    color = SIDES[members[0].side]
    hidden = sum(value <= 0 for record in members for value in record.raw)
    shown = evenly(len(members), _MOST_LINES)
    for number in shown:
        record, alpha = members[number], 1.0 - 0.6 * number / max(len(members) - 1, 1)
        kept = evenly(len(record.raw), MOST_POINTS)
        ranks, clipped = [i + 1 for i in kept], [record.clipped[i] for i in kept]
        positive = [record.raw[i] if record.raw[i] > 0 else math.nan for i in kept]
        axis.plot(ranks, clipped, color=color, alpha=alpha, linewidth=1.2)
        axis.plot(ranks, positive, ".", color=MUTED, alpha=alpha, markersize=2.2, markeredgewidth=0)
    axis.set_title(title, fontsize=7.5, linespacing=1.25)
    axis.tick_params(labelsize=7)
    axis.set_axisbelow(True)
    raised = sum(record.raised for record in members)
    notes = [f"{raised} raised"] if raised else []
    notes += [f"{len(shown)} of {len(members)} shown"] if len(shown) < len(members) else []
    notes += [f"{hidden} not positive"] if hidden else []
    place = {"transform": axis.transAxes, "fontsize": 7, "color": MUTED}
    axis.text(0.04, 0.06, "\n".join(notes), ha="left", va="bottom", **place)
    _whole_decades(axis, members)


def evenly(count: int, most: int) -> list[int]:
    """At most so many of ``count`` indices, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]


def _whole_decades(axis: Any, members: list[SpectrumRecord]) -> None:
    """A logarithmic axis with at least two labelled powers of ten."""
    from matplotlib.ticker import NullFormatter

    positive = [v for r in members for v in (*r.raw, *r.clipped) if v > 0]
    if not positive:
        return
    low, high = math.log10(min(positive)), math.log10(max(positive))
    axis.set_yscale("log")
    axis.yaxis.set_minor_formatter(NullFormatter())
    if math.floor(high) - math.ceil(low) < 1:
        axis.set_ylim(10 ** math.floor(low), 10 ** math.ceil(high + 1e-9))
