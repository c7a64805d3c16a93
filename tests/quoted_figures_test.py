"""Every figure with a unit in README and the pages comes from a record, or says why it does not."""

import json

import pytest

from benchmarks._numbers import QUOTED, figures, pages, prose, unlinked
from benchmarks._numbers._figures import Exempt, Linked


@pytest.mark.parametrize("page", pages())
def test_every_figure_is_linked_or_exempt(page):
    assert unlinked(page, prose(page), QUOTED) == [], "benchmarks/_numbers/_quoted.py"


def test_every_piece_is_of_a_page_and_has_a_figure():
    for piece in QUOTED:
        assert piece.page in pages(), piece
        assert list(figures(f" {piece.words()} ")), piece.words()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("takes 1.37 times as long", ["1.37 times"]),
        ("8 × 512 tokens and 1.2 ×, 24 % off", ["1.2 ×", "24 %"]),
        ("8.9 minutes, 5.29 GB, 450 GB/s, 60 s", ["8.9 minutes", "5.29 GB", "450 GB/s", "60 s"]),
        ("in 25 CPU seconds, 1,217 s", ["25 CPU seconds", "1,217 s"]),
        ("jax 0.10.2 since 2026-11-23, 3 seeds, 5 steps, n = 10,000", []),
    ],
)
def test_a_figure_is_a_number_in_front_of_a_unit(text, found):
    assert [text[a:b] for a, b in figures(text)] == found


def test_a_figure_that_has_left_its_record_is_named():
    linked = next(x for x in QUOTED if isinstance(x, Linked) and x.page == "README.md")
    text = prose("README.md")
    off = linked._replace(values=lambda record: [1.05 * x for x in linked.values(record)])
    wrong = unlinked("README.md", text, [x if x is not linked else off for x in QUOTED])
    assert wrong[0].startswith("README.md has no “error 32 × below SOAP's after 6.3 CPU s”")
    assert any("30 × is in no record and not exempt" in line for line in wrong)


def test_a_new_figure_is_named_and_an_exempt_one_is_not():
    exempt = [Exempt("README.md", "waits 3 s", "a setting")]
    assert unlinked("README.md", "It waits 3 s.", exempt) == []
    (line,) = unlinked("README.md", "It waits 3 s. It takes 4 GB.", exempt)
    assert line.startswith("README.md: 4 GB is in no record and not exempt")


def test_numbers_of_a_record_are_written_as_the_piece_formats_them(tmp_path, monkeypatch):
    from benchmarks._numbers import _figures

    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "benchmarks" / "results" / "made.json").write_text(json.dumps({"x": 1.234}))
    monkeypatch.setattr(_figures, "ROOT", tmp_path)
    linked = Linked("README.md", "takes {:.2f} times", "made.json", lambda record: [record["x"]])
    assert linked.words() == "takes 1.23 times"
