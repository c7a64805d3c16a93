"""Figures too wide for a phone are marked: they scroll there, so that labels stay legible."""

import re
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

PHONE = 480  # pixels; a figure of this width is legible at three quarters of it
WIDTH = re.compile(r'<svg[^>]*\bwidth="([\d.]+)(pt)?"')


def is_wide(svg: str) -> bool:
    """Whether an SVG is drawn wider than a phone can show it.

    >>> [is_wide(f'<svg width="{width}">') for width in ("345.6pt", "547.2pt", "736")]
    [False, True, True]
    """
    found = WIDTH.search(svg)
    return bool(found) and float(found[1]) * (96 / 72 if found[2] else 1) > PHONE


def _mark(app: Sphinx, tree: nodes.document) -> None:
    for image in tree.findall(nodes.image):
        path = Path(app.srcdir) / image["uri"]
        if path.suffix == ".svg" and path.is_file() and is_wide(path.read_text()):
            image["classes"].append("wide")


def setup(app: Sphinx) -> dict[str, bool]:
    """Mark the figures of every page."""
    app.connect("doctree-read", _mark)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
