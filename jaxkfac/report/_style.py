"""The look of the figures of a report, and how they get into a page."""

import base64
import io
from typing import Any

from jaxkfac.plot import FIGURE_STYLE, INK, MUTED, RULE, SIDES

__all__ = ["FIGURE_STYLE", "INK", "MUTED", "OPTIMIZERS", "RULE", "SIDES", "data_uri", "svg_bytes"]

OPTIMIZERS = {"kfac": ("K-FAC", "#1f5a92"), "adamw": ("AdamW", "#c8752d")}


def svg_bytes(figure: Any) -> bytes:
    """A figure as SVG, the same bytes for the same numbers."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def data_uri(svg: bytes) -> str:
    """An image that a page carries with it."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode("ascii")
