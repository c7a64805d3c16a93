"""The look of every figure: few colours, thin lines, fonts drawn as paths."""

import base64
import io
from typing import Any

INK, MUTED, RULE = "#1c2733", "#6b7885", "#d9dee3"
OPTIMIZERS = {"kfac": ("K-FAC", "#1f5a92"), "adamw": ("AdamW", "#c8752d")}
SIDES = {"A": "#1f5a92", "G": "#8a3b52", "diagonal": "#4d7358"}

FIGURE_STYLE: dict[Any, Any] = {
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


def svg_bytes(figure: Any) -> bytes:
    """A figure as SVG, the same bytes for the same numbers."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def data_uri(svg: bytes) -> str:
    """An image that a page carries with it."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode("ascii")
