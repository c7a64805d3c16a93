"""Pages link to records where they lie in the repository; on the site a record is a page, too."""

from sphinx.application import Sphinx

SOURCE, PAGES = "](../benchmarks/results/", "](records/"


def on_site(text: str) -> str:
    """The links of a page of ``docs`` to Markdown records as links to their pages.

    >>> on_site("[a](../benchmarks/results/plan.md), [b](../benchmarks/results/plan.json)")
    '[a](records/plan.md), [b](../benchmarks/results/plan.json)'
    """
    first, *rest = text.split(SOURCE)
    ends = (PAGES if end.partition(")")[0].endswith(".md") else SOURCE for end in rest)
    return first + "".join(start + end for start, end in zip(ends, rest))


def _read(app: Sphinx, page: str, source: list[str]) -> None:
    source[0] = on_site(source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    """Read every page so."""
    app.connect("source-read", _read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
