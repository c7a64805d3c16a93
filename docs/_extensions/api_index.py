"""The index of the API: every documented name with the first sentence of its docstring."""

from __future__ import annotations

import inspect
import pydoc
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

if TYPE_CHECKING:  # tests read the tables where there is no Sphinx
    from sphinx.application import Sphinx

MARK = "<!-- every public name -->"
DIRECTIVE = re.compile(
    r"^\.\. (currentmodule|automodule|autofunction|autoclass):: ([\w.]+)$", re.M
)


def documented(page: str) -> Iterator[str]:
    """Full names of what a page of the API documents, in its order."""
    module = ""
    for directive, name in DIRECTIVE.findall(page):
        if directive == "currentmodule":
            module = name
        elif directive == "automodule":
            yield from (f"{name}.{public}" for public in pydoc.locate(name).__all__)
        else:
            yield f"{module}.{name}"


def first_sentence(name: str) -> str:
    """The first sentence of the docstring of a function or a class; an alias is spelled out."""
    value: Any = pydoc.locate(name)
    if get_origin(value) is Literal:
        return (
            "One of " + ", ".join(f"`{choice!r}`" for choice in get_args(value)) + "."
        )
    if get_origin(value) is not None:
        return f"`{inspect.formatannotation(value)}`".replace("|", r"\|")
    text = inspect.getdoc(value)
    sentence = re.split(r"(?<=\.)\s", " ".join((text or "").split("\n\n")[0].split()))[
        0
    ]
    room = name.rpartition(".")[0]

    def role(match: re.Match[str]) -> str:
        """As Markdown writes it; without a module, the name is looked for in all of them."""
        kind, word = match.groups()
        target = f"{room}.{word}" if pydoc.locate(f"{room}.{word}") else f".{word}"
        return f"{{py:{kind}}}`{word} <{target}>`"

    sentence = re.sub(r":(\w+):`([\w.]+)`", role, sentence)
    return sentence.replace("``", "`").replace("|", r"\|")


def tables(folder: Path, pages: list[str]) -> str:
    """A table for each page that documents something."""
    parts = []
    for page in pages:
        text = (folder / f"{page}.md").read_text()
        names = list(documented(text))
        rows = [
            f"| {{py:obj}}`{name.split('.')[-1]} <{name}>` | {first_sentence(name)} |"
            for name in names
            if callable(pydoc.locate(name))
        ]
        if rows:
            title = text.partition("\n")[0].removeprefix("# ")
            parts.append(
                f"## [{title}]({page}.md)\n\n| | |\n|---|---|\n" + "\n".join(rows)
            )
    return "\n\n".join(parts)


def _fill(app: Sphinx, name: str, source: list[str]) -> None:
    if MARK in source[0]:
        pages = re.findall(r"^(\w+)$", source[0].partition("{toctree}")[2], re.M)
        source[0] = source[0].replace(MARK, tables(Path(app.srcdir) / "api", pages))


def setup(app: Sphinx) -> dict[str, bool]:
    """Fill the mark when a page is read."""
    app.connect("source-read", _fill)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
