"""Rank per depth: how many directions each factor has, from the first layer to the last."""

import math
from collections.abc import Sequence
from typing import Any

from jaxkfac._text import shortened
from jaxkfac.report._families import FactorFamily, families
from jaxkfac.report._spectra import SpectrumRecord
from jaxkfac.report._style import FIGURE_STYLE, MUTED, SIDES, svg_bytes

COLUMNS = 4
_LABELS = {"A": "A, inputs", "G": "G, output gradients", "diagonal": "diagonal"}


def ranks_figure(records: Sequence[SpectrumRecord]) -> bytes:
    """The entropy rank of every factor over its depth, a panel for each kind of layer.

    Depth is the slice of a stacked layer, or the order of layers whose names differ only
    in a number. Dashed: the size, which the rank cannot exceed. All panels share their
    logarithmic axis.

    Returns:
        The figure as SVG.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullLocator

    panels: dict[str, list[FactorFamily]] = {}
    for family in families(records, shared_once=False):
        panels.setdefault(family.title, []).append(family)
    with mpl.rc_context(FIGURE_STYLE):
        rows = max(math.ceil(len(panels) / COLUMNS), 1)
        figure = Figure(figsize=(9.2, 1.5 * rows + 0.8), layout="constrained")
        axes = figure.subplots(rows, COLUMNS, squeeze=False, sharey=True)
        for axis in axes.flat[len(panels) :]:
            axis.set_axis_off()
        for axis, (title, members) in zip(axes.flat, panels.items(), strict=False):
            for family in members:
                _draw(axis, family)
            axis.set_title(shortened(title, 34), fontsize=7.5)
        top = max((len(record.raw) for record in records), default=1)
        first = axes.flat[0]
        first.set_yscale("log")
        first.set_ylim(0.8, 1.6 * top)
        first.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        first.yaxis.set_minor_locator(NullLocator())
        figure.supxlabel("depth", fontsize=9)
        figure.supylabel("entropy rank", fontsize=9)
        _legend(figure, {record.side for record in records})
        return svg_bytes(figure)


def _draw(axis: Any, family: FactorFamily) -> None:
    from matplotlib.ticker import MaxNLocator, NullLocator

    color, depths = SIDES[family.side], range(len(family.members))
    ranks = [max(record.entropy_rank, 0.8) for record in family.members]
    sizes = [len(record.raw) for record in family.members]
    dashes = {"color": color, "linestyle": (0, (4, 3)), "linewidth": 0.8, "alpha": 0.6}
    if len(depths) > 1:
        axis.plot(depths, sizes, **dashes)
    else:
        axis.plot([-0.3, 0.3], sizes * 2, **dashes)
    axis.plot(depths, ranks, "o-", color=color, markersize=3.5, linewidth=1.2)
    pad = 0.06 * (len(depths) - 1) if len(depths) > 1 else 0.9
    axis.set_xlim(-pad, len(depths) - 1 + pad)
    axis.xaxis.set_major_locator(MaxNLocator(4, integer=True) if len(depths) > 1 else NullLocator())
    axis.tick_params(labelsize=7)
    axis.set_axisbelow(True)


def _legend(figure: Any, sides: set[str]) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=SIDES[side], marker="o", markersize=3.5, label=label)
        for side, label in _LABELS.items()
        if side in sides
    ]
    dashed = Line2D([], [], color=MUTED, linestyle=(0, (4, 3)), linewidth=0.8, label="size")
    figure.legend(handles=[*handles, dashed], loc="outside upper right", ncols=len(handles) + 1)
