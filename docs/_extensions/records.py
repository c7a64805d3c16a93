"""Pages link to records and notebooks where they lie; on the site each of them is a page, too."""

import re

from sphinx.application import Sphinx

RECORD = re.compile(r"\]\(\.\./benchmarks/results/(?:(\w+)\.md|(\w+)/README\.md)")
NOTEBOOK = re.compile(r"\]\(\.\./(notebooks/\w+)\.ipynb")


def on_site(text: str) -> str:
    """The links of a page of ``docs`` to Markdown records and notebooks as links to their pages.

    >>> on_site("[a](../benchmarks/results/plan.md), [b](../benchmarks/results/plan.json)")
    '[a](records/plan.md), [b](../benchmarks/results/plan.json)'
    >>> on_site("[a](../notebooks/04_accumulation.ipynb)")
    '[a](notebooks/04_accumulation.md)'
    >>> on_site("[a](../benchmarks/results/optimizers/README.md)")
    '[a](records/optimizers.md)'
    """
    return NOTEBOOK.sub(r"](\1.md", RECORD.sub(r"](records/\1\2.md", text))


def _read(app: Sphinx, page: str, source: list[str]) -> None:
    source[0] = on_site(source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    """Read every page so."""
    app.connect("source-read", _read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
