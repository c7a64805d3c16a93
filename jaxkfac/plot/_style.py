"""The style of every figure: few colours, thin lines, fonts drawn as paths.

A figure has a white face, on light and dark pages and on paper. Without one, its text would need a
colour that is legible on white and on a dark page: such a page, #131416, is 18.4 times darker than
white, so the best grey between has a contrast of 4.3 with each, and 4.5 is required (Web Content
Accessibility Guidelines 2.2, 1.4.3). Lines need 3 (1.4.11).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

FACE = "#ffffff"
INK, MUTED, RULE = "#1c2733", "#6b7885", "#d9dee3"
SIDES = {"A": "#1f5a92", "G": "#8a3b52", "diagonal": "#4d7358"}
COLORS = ("#1f5a92", "#c8752d", "#4d7358", "#8a3b52", "#7a6aa0", "#a68824", "#5f8fa8", "#98684f")

FIGURE_STYLE: dict[Any, Any] = {
    "figure.facecolor": FACE,
    "figure.figsize": (6.4, 3.2),
    "axes.facecolor": FACE,
    "savefig.facecolor": FACE,
    "savefig.transparent": False,
    "axes.prop_cycle": f"cycler('color', {list(COLORS)})",  # a string, as matplotlib may be missing
    "font.size": 9,
    "font.family": "sans-serif",
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.5,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.4,
    "svg.fonttype": "path",
    "svg.hashsalt": "jaxkfac",
}


@contextmanager
def drawing(ax: Any, *, height: float = 3.2) -> Iterator[Any]:
    """The axes to draw on: those given, unchanged, or new ones in this style.

    Args:
        ax: Axes given by the caller, or ``None``.
        height: Height of a new figure, inches.

    Raises:
        ImportError: matplotlib is not installed; the extra is named.
    """
    try:
        import matplotlib as mpl
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError('figures need matplotlib: pip install "jaxkfac[report]"') from error
    if ax is not None:
        yield ax
        return
    with mpl.rc_context(FIGURE_STYLE):
        yield pyplot.subplots(figsize=(6.4, height), layout="constrained")[1]
