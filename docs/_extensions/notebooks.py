"""Pages of the site made from notebooks as they are stored: nothing is executed, nothing loaded.

A page holds one fence, ``{notebook} PATH``; the notebook's cells and outputs take its place.
"""

import base64
import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

PAGE = re.compile(r"^```\{notebook\} (\S+)\n```$", re.MULTILINE)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
FENCE = "``````"  # longer than any in a cell
LINKS = (
    (re.compile(r"\]\((\d\d_\w+)\.ipynb"), r"](\1.md"),
    (re.compile(r"\]\(\.\./benchmarks/results/(\w+\.md)"), r"](../records/\1"),
    (re.compile(r"\]\(\.\./docs/"), r"](../"),
)


def on_site(text: str) -> str:
    """Links of a notebook, which lies beside ``docs``, as links between pages of the site.

    >>> on_site("[a](../docs/memory.md#once), [b](02_more.ipynb), [c](../benchmarks/results/d.md)")
    '[a](../memory.md#once), [b](02_more.md), [c](../records/d.md)'
    """
    for link, page in LINKS:
        text = link.sub(page, text)
    return text


def as_markdown(notebook: dict[str, Any]) -> str:
    r"""The cells of a notebook with their outputs, as MyST reads them.

    >>> stream = {"output_type": "stream", "name": "stdout", "text": ["3\n"]}
    >>> print(as_markdown({"cells": [
    ...     {"cell_type": "markdown", "source": ["# Sums"]},
    ...     {"cell_type": "code", "source": ["%config a\n", "print(1 + 2)"], "outputs": [stream]},
    ... ]}))
    # Sums
    <BLANKLINE>
    ``````python
    print(1 + 2)
    ``````
    <BLANKLINE>
    ``````{code-block} text
    :class: output
    <BLANKLINE>
    3
    ``````
    """
    parts, headings = [], list[str]()
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(on_site(source))
            headings += HEADING.findall(source)
            continue
        lines = [line for line in source.splitlines() if not line.startswith("%")]
        code = "\n".join(lines).strip("\n")
        parts.append(f"{FENCE}python\n{code}\n{FENCE}")
        for output in cell["outputs"]:
            title_and_section = dict.fromkeys([*headings[:1], *headings[-1:]])
            parts.extend(_output(output, ", ".join(title_and_section)))
    return "\n\n".join(parts)


def _output(output: dict[str, Any], heading: str) -> Iterator[str]:
    """The richest form of an output that a page can show."""
    data = {kind: "".join(value) for kind, value in output.get("data", {}).items()}
    if output["output_type"] == "stream":
        data = {"text/plain": "".join(output["text"])}
    if "image/svg+xml" in data:
        yield _figure(
            "svg+xml",
            base64.b64encode(data["image/svg+xml"].encode()).decode(),
            heading,
        )
    elif "image/png" in data:
        yield _figure("png", "".join(data["image/png"].split()), heading)
    elif "text/html" in data:
        yield f"{FENCE}{{raw}} html\n<div class='output'>{data['text/html']}</div>\n{FENCE}"
    elif "text/plain" in data:
        text = data["text/plain"].strip("\n")
        yield f"{FENCE}{{code-block}} text\n:class: output\n\n{text}\n{FENCE}"


def _figure(kind: str, content: str, heading: str) -> str:
    alternative = html.escape(f"Figure: {heading}")
    image = f'<img class="figure" alt="{alternative}" src="data:image/{kind};base64,{content}">'
    return f"{FENCE}{{raw}} html\n<div class='output'>{image}</div>\n{FENCE}"


def _read(app: Sphinx, page: str, source: list[str]) -> None:
    def read(found: re.Match[str]) -> str:
        path = (Path(app.env.doc2path(page)).parent / found[1]).resolve()
        app.env.note_dependency(str(path))
        parts = as_markdown(json.loads(path.read_text())).split("\n\n", 1)
        return f"\n\n{{download}}`Download this notebook <{found[1]}>`\n\n".join(parts)

    source[0] = PAGE.sub(read, source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    """Read every page so."""
    app.connect("source-read", _read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
