"""Formulas as MathML, made when the site is built: no script and no font is fetched to read it."""

import re

from docutils import nodes
from docutils.utils.math import MathError, latex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.writers.html5 import HTML5Translator

logger = logging.getLogger(__name__)
DIGITS = re.compile(r"(\\[dt]?frac)(\d)(\d)")


def _mathml(node: nodes.Element, *, block: bool) -> str:
    formula = DIGITS.sub(
        r"\1{\2}{\3}", node.astext()
    )  # docutils reads 12 as one number
    try:
        return latex2mathml.tex2mathml(formula, as_block=block)
    except MathError as error:
        logger.warning("formula %r: %s", node.astext(), error, location=node)
        return node.astext()


def _inline(translator: HTML5Translator, node: nodes.Element) -> None:
    translator.body.append(_mathml(node, block=False))
    raise nodes.SkipNode


def _block(translator: HTML5Translator, node: nodes.Element) -> None:
    translator.body.append(f'<div class="math">{_mathml(node, block=True)}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Make ``html_math_renderer = "mathml"`` known."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
