"""The first page's figure: an equation, an atom and twelve problems, from their records.

Run: python -m benchmarks.wins

Each panel is drawn from a record that another command makes: ``examples/poisson.py``,
``benchmarks.atoms`` and ``benchmarks.optimizers._clock``.
"""

import json
from pathlib import Path
from typing import Any

from benchmarks import atoms
from benchmarks.optimizers import _clock
from jaxkfac.plot import FIGURE_STYLE

RESULTS = Path(__file__).parent / "results"
FIGURE = RESULTS / "wins.svg"
# As wide as the text of a page, so that nothing is scaled.
SMALL = {"font.size": 8, "axes.labelsize": 8, "xtick.labelsize": 7, "ytick.labelsize": 7}


def equation(axis: Any, record: dict[str, Any]) -> None:
    """Errors over CPU seconds."""
    for name, (times, errors) in record["curves"].items():
        axis.semilogy(times, errors, label=name, lw=2 if name.startswith("jk.") else 1)
    axis.set(xlabel="CPU seconds", ylabel="relative error")
    axis.legend()


def draw(path: Path) -> None:
    """The three panels in one row."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    panels = {
        "Poisson's equation": (equation, "poisson/poisson.json"),
        "Beryllium": (atoms.panel, "atoms-cpu.json"),
        "Twelve problems": (_clock.panel, "clock-cpu.json"),
    }
    style = FIGURE_STYLE | SMALL | {"legend.fontsize": 6.5, "legend.handlelength": 1.2}
    with mpl.rc_context(style):
        figure = Figure(figsize=(7.6, 3.0), layout="constrained")
        axes = figure.subplots(1, 3)
        for axis, (title, (panel, record)) in zip(axes, panels.items(), strict=True):
            panel(axis, json.loads((RESULTS / record).read_text()))
            axis.set_title(title)
        axes[1].set_ylim(-15, 125)  # room for the legend
        # Without a date, the same numbers give the same bytes.
        figure.savefig(path, format="svg", metadata={"Date": None})


if __name__ == "__main__":
    draw(FIGURE)
