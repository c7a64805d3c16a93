"""Check a built site: every link inside it leads somewhere, and it loads nothing from a network.

python docs/_extensions/check_site.py build/site
"""

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """Links, loaded files and anchors of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors = {"", "top"}
        self.feed(text)

    def handle_starttag(
        self, tag: str, attributes: list[tuple[str, str | None]]
    ) -> None:
        """Note what the tag names, follows and loads."""
        of = {key: value or "" for key, value in attributes}
        self.anchors |= {of[key] for key in ("id", "name") if key in of}
        if tag == "a" and "href" in of:
            self.links.append(of["href"])
        loads = {
            "link": "href",
            "script": "src",
            "img": "src",
            "iframe": "src",
            "source": "src",
        }
        if (key := loads.get(tag)) in of and of.get("rel") not in (
            "canonical",
            "search",
        ):
            self.loaded.append(of[key])


def faults(root: Path) -> Iterator[str]:
    """What is wrong, a line each."""
    pages = {path: Page(path.read_text()) for path in sorted(root.rglob("*.html"))}
    for path, page in pages.items():
        where = path.relative_to(root)
        for address in page.loaded:
            if urlsplit(address).scheme not in ("", "data") or address.startswith("//"):
                yield f"{where}: loads {address} from a network"
        for address in page.links + page.loaded:
            link = urlsplit(address)
            if link.scheme or link.netloc:
                continue
            target = (path.parent / unquote(link.path)).resolve() if link.path else path
            if not target.is_file():
                yield f"{where}: {address} is not there"
            elif (
                target in pages and unquote(link.fragment) not in pages[target].anchors
            ):
                yield f"{where}: {address}: no such place on that page"


if __name__ == "__main__":
    found = list(faults(Path(sys.argv[1]).resolve()))
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(bool(found))
