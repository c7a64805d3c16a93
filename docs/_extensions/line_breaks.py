"""Where lines may break: code after its punctuation, numbers not before their units."""

import re

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

PUNCTUATION = re.compile(r"(?<=[(\[,=/_:])|(?<=\.)(?!\d)|(?<=[a-z]{3}-)")
SHORT = 6  # characters; a shorter piece of code is not parted from the next one
UNITS = r"[×%±]|CPU s\b|m?s\b|[KMGT]i?B\b"
SPACE = re.compile(rf"((?:[≤≥≈±]|&[lg]t;)) (?=[\d.−-])|(?<=\d) (?={UNITS})")
WHOLE = re.compile(r"\d[\d.]*e[-+]\d+|\b[A-Z]-[A-Z]\w+|\bkfac-jax\b")


def code(text: str) -> list[str]:
    """The pieces of a word of code, between which a line may break.

    >>> code("jk.Optimizer(loss_terms=...)"), code("jk.kfac(0.1)")
    (['jk.Optimizer(', 'loss_terms=', '...)'], ['jk.kfac(', '0.1)'])
    >>> code("value_grad_and_factors"), code("benchmarks/plan.json"), code("--batch-size")
    (['value_', 'grad_and_', 'factors'], ['benchmarks/', 'plan.json'], ['--batch-', 'size'])
    """
    pieces = [""]
    for part in PUNCTUATION.split(text):
        if len(pieces[-1]) < SHORT:
            pieces[-1] += part
        else:
            pieces.append(part)
    last = pieces.pop() if len(pieces[-1]) < SHORT - 2 else ""
    return [*pieces[:-1], pieces[-1] + last] if pieces else [last]


def prose(encoded: str) -> str:
    """Text with spaces that do not break between a number and its sign or unit.

    >>> prose("≤ 1.2 ×, 3e-05–7e-05").replace(chr(160), "~")
    '≤~1.2~×, <span class="whole">3e-05</span>–<span class="whole">7e-05</span>'
    >>> prose("K-FAC in 6 s").replace(chr(160), "~")
    '<span class="whole">K-FAC</span> in 6~s'
    """
    encoded = SPACE.sub(lambda found: f"{found[1] or ''}\N{NO-BREAK SPACE}", encoded)
    return WHOLE.sub(r'<span class="whole">\g<0></span>', encoded)


class LineBreaks(HTML5Translator):
    """Sphinx's translator with these breaks."""

    def visit_Text(self, node: nodes.Text) -> None:
        """Write text; code of a sentence or a table in pieces."""
        if isinstance(node.parent, nodes.literal) and self.protect_literal_text:
            for token in self.words_and_spaces.findall(node.astext()):
                if token.strip():
                    pieces = map(self.encode, code(token))
                    spans = (f'<span class="pre">{piece}</span>' for piece in pieces)
                    self.body.append("<wbr>".join(spans))
                else:
                    self.body.append("\N{NO-BREAK SPACE}" * (len(token) - 1) + " ")
        elif self.protect_literal_text or self.in_mailto:
            super().visit_Text(node)
        else:
            self.body.append(prose(self.encode(node.astext())))


def _remove_empty_heads(app: Sphinx, tree: nodes.document) -> None:
    """Remove the heading of a table without headings, which Markdown cannot leave out."""
    for head in list(tree.findall(nodes.thead)):
        if not head.astext().strip():
            head.parent.remove(head)


def setup(app: Sphinx) -> dict[str, bool]:
    """Write every page so."""
    app.set_translator("html", LineBreaks)
    app.connect("doctree-read", _remove_empty_heads)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
