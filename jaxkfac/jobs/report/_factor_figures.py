"""Figures of factors: spectra, ranks and condition numbers, as files and as panels of a page."""

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from jaxkfac._text import number, shortened
from jaxkfac.files import whole_file
from jaxkfac.jobs.report._layer_table import distinct_names
from jaxkfac.jobs.report._page import (
    LEAST_POINTS,
    MUTED,
    SIDES,
    Axis,
    Line,
    new_figure,
    panel_html,
    panels_html,
    svg_bytes,
)
from jaxkfac.jobs.report._spectra import SIDE_TEXT, FactorFamily, SpectrumRecord, ends, families

# ---------------- spectra: one panel for each factor of each layer


COLUMNS = 4
_MOST_LINES, MOST_POINTS = 16, 256  # with every point, a page would have many megabytes
_TITLES = {"A": "A, inputs", "G": "G, output gradients", "diagonal": "diagonal"}


def spectra_figure(records: Sequence[SpectrumRecord]) -> bytes:
    """Plot eigenvalues over their rank: before clipping as dots, after it as lines.

    Slices of a stacked layer, and layers whose names differ only in a number, share a panel with
    later ones lighter. A panel shows at most 16 of them and 256 eigenvalues of each. An input
    factor that several layers share is drawn once. Non-positive values cannot be drawn on a
    logarithmic axis; the panel states how many there are. Factors with fewer than five eigenvalues
    are a table below the panels.

    Returns:
        The figure as SVG.
    """
    drawn, few = [], []
    for title, members in panels(records):
        is_drawn = max(len(record.raw) for record in members) >= LEAST_POINTS
        (drawn if is_drawn else few).append((title, members))
    rows = math.ceil(len(drawn) / COLUMNS)
    heights = [1.75 * rows + 0.6 if rows else 0.0, 0.17 * len(few) + 0.4 if few else 0.0]
    with new_figure(sum(heights) or 0.4) as figure:
        upper, lower = figure, figure
        if rows and few:
            upper, lower = figure.subfigures(2, height_ratios=heights)
        if rows:
            axes = upper.subplots(rows, COLUMNS, squeeze=False)
            for axis in axes.flat[len(drawn) :]:
                axis.set_axis_off()
            for axis, (title, members) in zip(axes.flat, drawn, strict=False):
                _draw_spectra(axis, title, members)
            upper.supxlabel("rank of the eigenvalue", fontsize=9)
            upper.supylabel("eigenvalue", fontsize=9)
            _spectra_legend(upper)
        if few:
            _few_eigenvalues(lower, few)
        return svg_bytes(figure)


def panels(
    records: Sequence[SpectrumRecord], *, separate: bool = False
) -> list[tuple[str, list[SpectrumRecord]]]:
    """Titles and members of the panels, with each factor under the layer that stores it."""
    order = {"A": 0, "G": 0, "diagonal": 1}
    in_order = sorted(
        families(records, shared_once=True, separate=separate),
        key=lambda family: order[family.side],
    )
    return [(f"{family.title}\n{_TITLES[family.side]}", family.members) for family in in_order]


class _Curve(NamedTuple):
    """The eigenvalues of one factor that a panel shows, and its place from 0 to 1 in the panel."""

    record: SpectrumRecord
    place: float
    ranks: list[int]
    raw: list[float]
    clipped: list[float]


def _curves(members: Sequence[SpectrumRecord]) -> tuple[list[_Curve], list[str]]:
    """What a panel shows of its members, and notes of what was raised or is not shown."""
    shown, curves = evenly(len(members), _MOST_LINES), []
    for i in shown:
        record, place = members[i], i / max(len(members) - 1, 1)
        at = evenly(len(record.raw), MOST_POINTS)
        raw, clipped = ([values[i] for i in at] for values in (record.raw, record.clipped))
        curves.append(_Curve(record, place, [i + 1 for i in at], raw, clipped))
    raised = sum(record.raised for record in members)
    hidden = sum(value <= 0 for record in members for value in record.raw)
    notes = [f"{raised} raised"] if raised else []
    notes += [f"{len(shown)} of {len(members)} shown"] if len(shown) < len(members) else []
    return curves, notes + ([f"{hidden} not positive"] if hidden else [])


def _draw_spectra(axis: Any, title: str, members: list[SpectrumRecord]) -> None:
    from matplotlib.ticker import MaxNLocator

    color, (curves, notes) = SIDES[members[0].side], _curves(members)
    for _, place, ranks, raw, clipped in curves:
        alpha, positive = 1.0 - 0.6 * place, [x if x > 0 else math.nan for x in raw]
        axis.plot(ranks, clipped, color=color, alpha=alpha, linewidth=1.2)
        axis.plot(ranks, positive, ".", color=MUTED, alpha=alpha, markersize=2.2, markeredgewidth=0)
    axis.set_title(title, fontsize=8, linespacing=1.25)
    axis.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axis.set_axisbelow(True)
    style = {"transform": axis.transAxes, "fontsize": 8, "color": MUTED}
    axis.text(0.04, 0.06, "\n".join(notes), ha="left", va="bottom", **style)
    _whole_decades(axis, members)


def _spectra_legend(figure: Any) -> None:
    from matplotlib.lines import Line2D

    dot = Line2D([], [], color=MUTED, linestyle="", marker=".", label="as decomposed")
    line = Line2D([], [], color=MUTED, linewidth=1.2, label="after clipping")
    figure.legend(handles=[dot, line], loc="outside upper right", ncols=2)


def _few_eigenvalues(figure: Any, few: Sequence[tuple[str, list[SpectrumRecord]]]) -> None:
    """A row for each factor that has too few eigenvalues for a panel, with their values."""
    rows = [("Fewer than five eigenvalues, as decomposed", "", "", MUTED)]
    for title, members in few:
        name, _, side = title.partition("\n")
        values = sorted((value for record in members for value in record.raw), reverse=True)
        shown = ", ".join(map(number, values))
        if len(members) > 1:
            each = f"{len(members)} factors of {len(members[0].raw)}"
            shown = f"{each}: {number(values[0])} … {number(values[-1])}"
        raised = sum(record.raised for record in members)
        shown += f" ({raised} raised)" if raised else ""
        rows.append((shortened(name, 44), side, shown, SIDES[members[0].side]))
    for i, (*cells, color) in enumerate(rows):
        for x, cell in zip((0.01, 0.36, 0.53), cells, strict=True):
            y = 1 - (i + 0.6) / (len(rows) + 0.4)
            figure.text(x, y, cell, color=color, fontsize=8, va="center")


def evenly(count: int, most: int) -> list[int]:
    """At most ``most`` evenly spaced indices of ``count``, including the first and the last."""
    if count <= most:
        return list(range(count))
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]


def _whole_decades(axis: Any, members: list[SpectrumRecord]) -> None:
    """Make the axis logarithmic, with at least two labelled powers of ten."""
    from matplotlib.ticker import NullFormatter

    positive = [v for r in members for v in (*r.raw, *r.clipped) if v > 0]
    if not positive:
        return
    low, high = math.log10(min(positive)), math.log10(max(positive))
    axis.set_yscale("log")
    axis.yaxis.set_minor_formatter(NullFormatter())
    if math.floor(high) - math.ceil(low) < 1:
        axis.set_ylim(10 ** math.floor(low), 10 ** math.ceil(high + 1e-9))


# ---------------- entropy rank over depth


def ranks_figure(records: Sequence[SpectrumRecord]) -> bytes:
    """Plot the entropy rank of every factor over depth, with a panel for each kind of layer.

    A model of fewer than five blocks has one panel, with a row for each factor.

    Depth is the slice of a stacked layer, or the order of layers whose names differ only in a
    number. The dashed line is the size, an upper bound of the rank. All panels share their
    logarithmic axis.

    Returns:
        The figure as SVG.
    """
    from matplotlib.ticker import FuncFormatter, NullLocator

    every = families(records, shared_once=False)
    if max((len(family.members) for family in every), default=0) < LEAST_POINTS:
        return _rank_rows(every)
    panels: dict[str, list[FactorFamily]] = {}
    for family in every:
        panels.setdefault(family.title, []).append(family)
    rows = max(math.ceil(len(panels) / COLUMNS), 1)
    with new_figure(1.5 * rows + 0.8) as figure:
        axes = figure.subplots(rows, COLUMNS, squeeze=False, sharey=True)
        for axis in axes.flat[len(panels) :]:
            axis.set_axis_off()
        for axis, (title, members) in zip(axes.flat, panels.items(), strict=False):
            for family in members:
                _draw_ranks(axis, family)
            axis.set_title(shortened(title, 32), fontsize=8)
        top = max((len(record.raw) for record in records), default=1)
        first = axes.flat[0]
        first.set_yscale("log")
        first.set_ylim(0.8, 1.6 * top)
        first.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        first.yaxis.set_minor_locator(NullLocator())
        figure.supxlabel("depth", fontsize=9)
        figure.supylabel("entropy rank", fontsize=9)
        _ranks_legend(figure, {record.side for record in records})
        return svg_bytes(figure)


def _draw_ranks(axis: Any, family: FactorFamily) -> None:
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
    axis.set_axisbelow(True)


def _rank_rows(rows: Sequence[FactorFamily]) -> bytes:
    """A row for each factor, with its rank as a dot and its size as a bar."""
    from matplotlib.ticker import LogLocator, NullFormatter

    with new_figure(0.18 * len(rows) + 1.1) as figure:
        axis = figure.subplots()
        for y, family in enumerate(rows):
            ranks = [max(record.entropy_rank, 0.8) for record in family.members]
            sizes = [len(record.raw) for record in family.members]
            color = SIDES[family.side]
            axis.plot(ranks, [y] * len(ranks), "o", color=color, markersize=3.5)
            axis.plot(sizes, [y] * len(sizes), "|", color=color, markersize=8)
        _name_rows(axis, rows)
        axis.set(xscale="log", xlabel="entropy rank (dots) and size (bars)")
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter(NullFormatter())
        return svg_bytes(figure)


def _name_rows(axis: Any, rows: Sequence[FactorFamily]) -> None:
    labels = [f"{shortened(f.title, 44)}   {SIDE_TEXT[f.side]}" for f in rows]
    axis.set_yticks(range(len(rows)), labels, fontsize=8)
    for label, family in zip(axis.get_yticklabels(), rows, strict=True):
        label.set_color(SIDES[family.side])
    axis.set_ylim(len(rows) - 0.3, -0.7)
    axis.tick_params(axis="y", length=0)


def _ranks_legend(figure: Any, sides: set[str]) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=SIDES[side], marker="o", markersize=3.5, label=label)
        for side, label in _TITLES.items()
        if side in sides
    ]
    dashed = Line2D([], [], color=MUTED, linestyle=(0, (4, 3)), linewidth=0.8, label="size")
    figure.legend(handles=[*handles, dashed], loc="outside upper right", ncols=len(handles) + 1)


# ---------------- condition numbers before and after clipping


def conditions_figure(records: Sequence[SpectrumRecord]) -> bytes:
    """Draw a line for each factor from its condition number before clipping to that after.

    Depths of the same factor lie in one row, the first on top. A factor whose smallest eigenvalue
    is not positive has an infinite condition number and starts at the right edge.

    Returns:
        The figure as SVG.
    """
    from matplotlib.ticker import NullLocator

    rows = families(records, shared_once=True)
    conditions = [
        x for r in records for x in (r.condition_raw, r.condition_clipped) if x is not None
    ]
    low, high = ends(conditions)
    infinite = any(record.condition_raw is None for record in records)
    last = math.ceil(math.log10(high) + 1e-9)
    edge = 10.0 ** (last + max(1, round(0.06 * last)))
    depths = max((len(family.members) for family in rows), default=1)
    height = (0.16 + 0.02 * min(depths, 24)) * len(rows)
    with new_figure(height + 1.1) as figure:
        axis = figure.subplots()
        for y, family in enumerate(rows):
            _draw_conditions(axis, y, family, edge)
        _name_rows(axis, rows)
        axis.set_xscale("log")
        axis.set_xlim(10.0 ** math.floor(math.log10(low) - 0.02), edge * (2 if infinite else 1))
        decades = range(math.floor(math.log10(low)), last + 1)
        axis.set_xticks([10.0**k for k in decades[:: -(-len(decades) // 12)]])
        axis.xaxis.set_minor_locator(NullLocator())
        if infinite:
            axis.axvline(edge, color=MUTED, linewidth=0.6)
            axis.text(edge, -0.8, "infinite", ha="center", va="bottom", fontsize=8, color=MUTED)
        axis.set_xlabel("condition number")
        axis.set_axisbelow(True)
        _conditions_legend(figure)
        return svg_bytes(figure)


def _draw_conditions(axis: Any, y: int, family: FactorFamily, edge: float) -> None:
    color, count = SIDES[family.side], len(family.members)
    for i, record in enumerate(family.members):
        if record.condition_clipped is None:  # all eigenvalues are zero
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


def _conditions_legend(figure: Any) -> None:
    from matplotlib.lines import Line2D

    dot = {"color": MUTED, "linestyle": "", "marker": "o", "markersize": 4}
    before = Line2D([], [], markerfacecolor="white", label="before clipping", **dot)
    after = Line2D([], [], label="after clipping", **dot)
    figure.legend(handles=[before, after], loc="outside lower center", ncols=2)


# ---------------- panels of a page


_COLORS = {"A": "a", "G": "g", "diagonal": "diagonal"}
_LEGEND = (("a", "A, inputs"), ("g", "G, output gradients"), ("diagonal", "diagonal"))
_TICK = 26  # letters of a name below a panel


def factor_panels_html(records: Sequence[SpectrumRecord]) -> str:
    """Ranks and condition numbers over depth, then a panel for each factor."""
    sides = {_COLORS[record.side] for record in records}
    legend = [(color, text) for color, text in _LEGEND if color in sides]
    over = panels_html(list(_over_depth(records)), legend=legend)
    panels_of_factors = [
        _spectrum(title, members) for title, members in panels(records, separate=True)
    ]
    return (
        f"{over}<p>{escape(_ranks_sentence(records))} Entropy rank is exp(entropy) of the "
        "normalized eigenvalues. Layers are in the model's order. Where the smallest eigenvalue is "
        "not positive the condition number is infinite, and there is a gap.</p>"
        f"{panels_html(panels_of_factors)}<p>{_decay_sentence(records)} Dots: eigenvalues of the "
        "running average, as decomposed. Lines: after clipping.</p>"
    )


def _stored_once(records: Sequence[SpectrumRecord]) -> list[SpectrumRecord]:
    """Without the inputs of layers that read another layer's input."""
    return [r for r in records if r.side != "A" or r.source == r.layer]


def _ranks_sentence(records: Sequence[SpectrumRecord]) -> str:
    """Which share of their sizes the ranks are, and the factor with the least."""
    stored = _stored_once(records)
    share = statistics.median(r.entropy_rank / len(r.raw) for r in stored)
    least = min(stored, key=lambda r: r.entropy_rank / len(r.raw))
    rank, size = number(least.entropy_rank), f"{len(least.raw):,}"
    return (
        f"The median entropy rank is {share:.0%} of the factor's size; the lowest share is that of "
        f"{_name(least)}, {_TITLES[least.side]}: {rank} of {size}."
    )


def _decay_sentence(records: Sequence[SpectrumRecord]) -> str:
    """How few eigenvalues hold most of a trace, and how many clipping raises."""
    stored = _stored_once(records)
    shares = []
    for record in stored:
        sums = list(itertools.accumulate(max(value, 0.0) for value in record.raw))
        shares.append(sum(value < 0.9 * sums[-1] for value in sums) + 1)
        shares[-1] /= len(sums)
    raised, total = sum(r.raised for r in stored), sum(len(r.raw) for r in stored)
    return (
        f"In the median factor, {statistics.median(shares):.0%} of the eigenvalues hold 90 % of "
        f"the trace. Clipping raises {raised:,} of {total:,} eigenvalues."
    )


def _over_depth(records: Sequence[SpectrumRecord]) -> Iterator[str]:
    columns = {"entropy rank": "entropy_rank", "condition number": "condition_raw",
               "condition number after clipping": "condition_clipped"}  # fmt: skip
    # Both factors of a layer stand above its name.
    places = {name: place for place, name in enumerate(dict.fromkeys(map(_name, records)))}
    ticks = [name.replace("\n", "") for name in distinct_names(places, _TICK).values()]
    for title, field in columns.items():
        lines = []
        for side, color in _COLORS.items():
            of = [r for r in records if r.side == side]
            if side == "A":  # an input shared by several layers is drawn once
                of = [r for r in of if r.source == r.layer]
            names = [_name(r) for r in of]
            values = [getattr(r, field) for r in of]
            where = [places[name] for name in names]
            lines.append(Line(side, where, values, color, dots=len(of) == 1, names=names))
        yield panel_html(title.capitalize(), lines, Axis("layer", names=ticks), Axis("", log=True))


def _name(record: SpectrumRecord) -> str:
    return record.layer + "".join(f"[{i}]" for i in record.slice)


def _spectrum(title: str, members: Sequence[SpectrumRecord]) -> str:
    color, (curves, notes), lines = _COLORS[members[0].side], _curves(members), []
    for record, _, ranks, raw, clipped in curves:
        name = "".join(f"[{i}]" for i in record.slice)
        lines += [
            Line(f"clipped{name}", ranks, clipped, color),
            Line(f"raw{name}", ranks, raw, "muted", dots=True, faint=len(members) > 1),
        ]
    layer = " ".join(dict.fromkeys([title, *(r.layer for r in members)]))
    return panel_html(
        title.replace("\n", ": "),
        lines,
        Axis("rank"),
        Axis("eigenvalue", log=True),
        layer=layer,
        note=", ".join(notes),
    )


# ---------------- all figures, by file name


def factor_figures(records: Sequence[SpectrumRecord]) -> dict[str, bytes]:
    """``{"spectra", "ranks", "conditions": SVG}`` of all factors."""
    return {
        "spectra": spectra_figure(records),
        "ranks": ranks_figure(records),
        "conditions": conditions_figure(records),
    }


def write_factor_figures(folder: Path, records: Sequence[SpectrumRecord]) -> None:
    """Write the figures of the factors as SVG files into a folder, which is created if needed."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, svg in factor_figures(records).items():
        with whole_file(folder / f"{name}.svg", f"the figure {name}", nbytes=len(svg)) as file:
            file.write(svg)
