"""Docstrings write formulas as Markdown does, between dollars: autodoc reads them as roles."""

import re
from typing import Any

from jax.typing import ArrayLike
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.typing import stringify_annotation

BLOCK = re.compile(r"^( *)\$\$\s*(.+?)\s*\$\$([.,;]?)$", re.MULTILINE | re.DOTALL)
ARRAY_LIKE = stringify_annotation(ArrayLike, "smart")
INLINE = re.compile(r"(?<![\\\w$])\$(?=\S)([^$`]+?)(?<=\S)\$(?![\w$])")


def formulas(text: str) -> str:
    """``$$...$$`` as a directive, ``$...$`` as a role; literals between backquotes stay.

    >>> formulas("the sum $a + b$ of ``$HOME``")
    'the sum :math:`a + b` of ``$HOME``'
    """
    text = BLOCK.sub(_directive, text)
    literal = re.compile(r"(``.+?``)", re.DOTALL)
    parts = literal.split(text)
    parts[::2] = [INLINE.sub(_role, part) for part in parts[::2]]
    return "".join(parts)


def _directive(found: re.Match[str]) -> str:
    indent, formula, end = found.groups()
    return f"\n{indent}.. math:: {' '.join(formula.split())}{end}\n"


def _role(found: re.Match[str]) -> str:
    return f":math:`{' '.join(found[1].split())}`"


def _process(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    lines[:] = formulas("\n".join(lines)).split("\n")


def _short(
    app: Sphinx,
    what: str,
    name: str,
    obj: Any,
    options: Any,
    signature: str | None,
    returns: Any,
) -> tuple[str | None, Any]:
    def short(text: str | None) -> str | None:
        return text and text.replace(ARRAY_LIKE, "ArrayLike").replace(
            "jaxlib._jax.Array", "Array"
        )

    return short(signature), short(returns)


_analyze = ModuleAnalyzer.analyze


def _analyze_without_overloads(self: ModuleAnalyzer) -> None:
    """Show one signature of each function: overloads serve type checkers, and fill a screen."""
    _analyze(self)
    self.overloads = {}


def setup(app: Sphinx) -> dict[str, bool]:
    """Read every docstring so, before napoleon reads its sections."""
    app.connect("autodoc-process-docstring", _process, priority=100)
    ModuleAnalyzer.analyze = _analyze_without_overloads
    app.connect(
        "autodoc-process-signature", _short
    )  # jaxtyping names the class behind jax.Array
    return {"parallel_read_safe": True, "parallel_write_safe": True}
