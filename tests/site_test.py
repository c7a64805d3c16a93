"""The site says everything, leads nowhere wrong, and what checks it finds what is wrong.

``make site`` builds it and runs the examples of its extensions; here is what needs no Sphinx.
"""

import json
import pydoc
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import jaxkfac as jk

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"(?<!`)\]\(([^)\s]+)\)")
MADE = ("numbers", "documents", "zoo")  # from records and programs, by commands


API_INDEX = ROOT / "docs" / "_extensions" / "api_index.py"
CHECK_SITE = ROOT / "docs" / "_extensions" / "check_site.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_between_files_lead_somewhere(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    for address in LINK.findall(text):
        path = address.partition("#")[0]
        if path and "://" not in path:
            assert (page.parent / path).exists(), f"{page.name}: {address}"


WITHOUT_PYTORCH = """
import sys
from pathlib import Path
sys.modules.update(torch=None, jax=None)
from benchmarks import _numbers, documents
assert _numbers.page()
record = documents._record("cpu")
documents.ROOT = documents.RESULTS = Path(sys.argv[1])
documents._write_pages(record, "cpu")
"""


@pytest.mark.slow
def test_the_site_makes_the_pages_of_records_where_pytorch_is_not(tmp_path):
    recipe = re.search(r"^site:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)
    assert recipe
    for command in ("benchmarks.numbers --write docs/numbers.md", "benchmarks.documents --page"):
        assert f"python -m {command}\n" in recipe[1]
    (tmp_path / "docs").mkdir()
    subprocess.run([sys.executable, "-c", WITHOUT_PYTORCH, str(tmp_path)], check=True, cwd=ROOT)
    page = Path("docs") / "documents.md"
    assert (tmp_path / page).read_text() == (ROOT / page).read_text()


def test_the_written_pages_are_short_enough_to_read():
    """Words with a letter or a digit, code included, of the README and the pages."""
    written = (page for page in PAGES if page.stem not in MADE and "records" not in page.parts)
    words = {page: len(re.findall(r"\S*\w\S*", page.read_text())) for page in written}
    assert sum(words.values()) <= 36_000, sorted(words.items(), key=lambda item: -item[1])[:8]


def test_every_notebook_has_its_page():
    pages = {page.stem: page.read_text() for page in (ROOT / "docs" / "notebooks").glob("*.md")}
    index = pages.pop("index")
    names = {notebook.stem for notebook in (ROOT / "notebooks").glob("*.ipynb")}
    assert pages == {name: f"```{{notebook}} ../../notebooks/{name}.ipynb\n```\n" for name in names}
    assert {*re.findall(r"\((\w+)\.md\)", index)} == names


def test_links_of_notebooks_lead_somewhere():
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        cells = json.loads(notebook.read_text())["cells"]
        text = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
        for address in LINK.findall(text):
            path = address.partition("#")[0]
            if path and "://" not in path:
                assert (notebook.parent / path).exists(), f"{notebook.name}: {address}"


def test_the_index_of_the_api_has_every_public_name_with_a_sentence():
    pages = [page.stem for page in (ROOT / "docs" / "api").glob("*.md")]
    tables = runpy.run_path(str(API_INDEX))["tables"](ROOT / "docs" / "api", pages)
    rows = dict(re.findall(r"^\| \{py:obj\}`(\w+) <[\w.]+>` \| (.*) \|$", tables, re.M))
    missing = {name for name in jk.__all__ if not rows.get(name) and callable(getattr(jk, name))}
    assert not missing


def test_every_public_name_is_documented():
    text = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    documented = set(re.findall(r"^\.\. auto(?:function|class):: (\w+)$", text, re.M))
    for room in re.findall(r"^\.\. automodule:: jaxkfac\.([\w.]+)$", text, re.M):
        module = pydoc.locate(f"jaxkfac.{room}")
        documented |= {room.split(".")[-1], *getattr(module, "__all__", vars(module))}
    assert set(jk.__all__) <= documented


def test_every_page_is_in_a_table_of_contents():
    docs = ROOT / "docs"
    listed = set()
    for index in docs.rglob("*.md"):
        trees = re.findall(r"^```\{toctree\}\n(.*?)^```$", index.read_text(), re.M | re.S)
        for line in "\n".join(trees).splitlines():
            if line and not line.startswith(":"):
                listed |= {page.resolve() for page in index.parent.glob(f"{line}.md")}
    assert listed == {page for page in docs.rglob("*.md") if page != docs / "index.md"}


def test_the_check_finds_dead_links_and_what_a_network_would_bring(tmp_path):
    (tmp_path / "a.html").write_text(
        '<p id="here"><a href="b.html#there">1</a> <a href="b.html#gone">2</a>'
        '<a href="c.html">3</a>'
        '<a href="#here">4</a> <a href="https://example.org/">5</a>'
        '<script src="https://example.org/x.js"></script><link rel="stylesheet" href="x.css">'
    )
    (tmp_path / "b.html").write_text('<p id="there">')
    assert list(runpy.run_path(str(CHECK_SITE))["faults"](tmp_path)) == [
        "a.html: loads https://example.org/x.js from a network",
        "a.html: b.html#gone: no such place on that page",
        "a.html: c.html is not there",
        "a.html: x.css is not there",
    ]


def test_the_sidebar_has_four_captions_and_at_most_thirty_entries():
    text = (ROOT / "docs" / "index.md").read_text()
    trees = re.findall(
        r"^```\{toctree\}\n:caption: ([^\n]+)\n:hidden:\n(.*?)^```$", text, re.M | re.S
    )
    captions, entries = zip(*trees, strict=True)
    assert captions == ("Tutorials", "How-to guides", "Explanation", "Reference")
    assert len(" ".join(entries).split()) <= 30


def test_figures_of_pages_are_drawn_as_wide_as_they_are_shown():
    """The column has 736 pixels: in a wider figure, labels would shrink below their size."""
    shown = re.compile(r"!\[[^\]]+\]\(([^)\s]+\.svg)\)")
    figures = {(p.parent / x).resolve() for p in PAGES for x in shown.findall(p.read_text())}
    assert len(figures) >= 8
    for path in figures:
        found = re.search(r'<svg[^>]* width="([\d.]+)(pt)?"', path.read_text())
        assert found, f"{path.name} has no width, so a browser chooses one"
        assert float(found[1]) * (96 / 72 if found[2] else 1) <= 736, path.name


def test_figures_with_colors_for_dark_pages_are_not_inverted_there():
    style = (ROOT / "docs" / "_static" / "site.css").read_text()
    excepted = re.findall(r'img:not\(\[src\$="([\w.]+)"\]\)', style)
    both = [p.name for p in ROOT.glob("docs/_static/*.svg") if "prefers-color" in p.read_text()]
    assert len(excepted) == 2 and {*excepted} == {*both} - {"favicon.svg"}


def test_lines_of_code_fit_a_narrow_column():
    for script in (ROOT / "notebooks").glob("*.py"):
        lines = [line for line in script.read_text().splitlines() if not line.startswith("#")]
        assert max(map(len, lines)) <= 88, script.name
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        blocks = re.findall(r"^```\w+\n(.*?)^```$", page.read_text(), re.M | re.S)
        long = [line for block in blocks for line in block.splitlines() if len(line) > 88]
        assert not long, (page.name, long)
