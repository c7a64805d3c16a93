"""The spectra of all factors as panels of a page, and their ranks and conditions over depth."""

from collections.abc import Iterator, Sequence

from jaxkfac.report._panels import Axis, Line, panel_html, panels_html
from jaxkfac.report._spectra import SpectrumRecord
from jaxkfac.report._spectra_figure import MOST_POINTS, evenly
from jaxkfac.report._spectra_figure import panels as factor_panels

_COLORS = {"A": "a", "G": "g", "diagonal": "diagonal"}
_LEGEND = (("a", "A, inputs"), ("g", "G, output gradients"), ("diagonal", "diagonal"))
_MOST_SLICES = 12  # of a stack in one panel


def factor_panels_html(records: Sequence[SpectrumRecord]) -> str:
    """Ranks and condition numbers over depth, then a panel for each factor."""
    over = panels_html(list(_over_depth(records)), legend=_LEGEND)
    each = [_spectrum(title, members) for title, members in factor_panels(records, apart=True)]
    return (
        f"{over}<p>Entropy rank, exp(entropy) of the normalised eigenvalues, and condition "
        "number, of every factor in the model's order. Where the smallest eigenvalue is not "
        "positive the condition is infinite, and there is a gap.</p>"
        f"{panels_html(each)}<p>Dots: eigenvalues of the running average, as decomposed. Lines: "
        "after clipping.</p>"
    )


def _over_depth(records: Sequence[SpectrumRecord]) -> Iterator[str]:
    columns = {"entropy rank": "entropy_rank", "condition number": "condition_raw",
               "condition number after clipping": "condition_clipped"}  # fmt: skip
    for title, field in columns.items():
        lines = []
        for side, color in _COLORS.items():
            of = [r for r in records if r.side == side]
            if side == "A":  # an input that several layers read is drawn once
                of = [r for r in of if r.source == r.layer]
            names = [r.layer + "".join(f"[{i}]" for i in r.slice) for r in of]
            values = [getattr(r, field) for r in of]
            where = list(range(1, len(of) + 1))
            lines.append(Line(side, where, values, color, dots=len(of) == 1, names=names))
        yield panel_html(title.capitalize(), lines, Axis("factor"), Axis("", log=True))


def _spectrum(title: str, members: Sequence[SpectrumRecord]) -> str:
    step = -(-len(members) // _MOST_SLICES)
    color, lines = _COLORS[members[0].side], []
    for record in members[::step]:
        kept = evenly(len(record.raw), MOST_POINTS)
        ranks, clipped = [i + 1 for i in kept], [record.clipped[i] for i in kept]
        name = "".join(f"[{i}]" for i in record.slice)
        raw, faint = [record.raw[i] for i in kept], len(members) > 1
        lines += [
            Line(f"clipped{name}", ranks, clipped, color),
            Line(f"raw{name}", ranks, raw, "muted", dots=True, faint=faint),
        ]
    notes = []
    if raised := sum(record.raised for record in members):
        notes.append(f"{raised} raised")
    if hidden := sum(value <= 0 for record in members for value in record.raw):
        notes.append(f"{hidden} not positive")
    if step > 1:
        notes.append(f"{len(members[::step])} of {len(members)} slices")
    layer = " ".join(dict.fromkeys([title, *(r.layer for r in members)]))
    return panel_html(
        title.replace("\n", ": "),
        lines,
        Axis("rank"),
        Axis("eigenvalue", log=True),
        layer=layer,
        note=", ".join(notes),
    )
