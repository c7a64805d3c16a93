"""The page around the parts of a report: its look, by day and by night, and its little script."""

from collections.abc import Sequence
from html import escape
from importlib.resources import files

_FEW = 8  # layers, which need no filter


def page_html(title: str, lead: str, parts: Sequence[str], *, answer: Sequence[str] = ()) -> str:
    """A page that carries everything with it: no font, image, script or server from elsewhere.

    Where parts show many layers (``data-layer``) there is a field that leaves some out.

    Args:
        title: Heading.
        lead: One sentence below it.
        parts: As HTML.
        answer: What has come out, in sentences; before everything else.
    """
    look, script = (_part(name) for name in ("_page.css", "_page.js"))
    body = "\n".join(parts)
    said = f'<p class="answer">{escape(" ".join(answer))}</p>' if answer else ""
    field = (
        '<div class="filter"><input type="search" aria-label="layers to show" '
        'placeholder="show layers with … in their name"></div>'
        if body.count(" data-layer=") > _FEW
        else ""
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{look}</style></head>\n<body><main>\n"
        f'<h1>{escape(title)}</h1>\n<p class="lead">{escape(lead)}</p>\n{said}{field}\n'
        f'{body}\n</main><div id="tip"></div><script>{script}</script></body></html>\n'
    )


def _part(name: str) -> str:
    return files("jaxkfac.report").joinpath(name).read_text("utf-8")
