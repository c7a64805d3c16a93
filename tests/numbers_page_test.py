"""``docs/numbers.md`` is what its command makes of the records, and hides no missed goal."""

import json
from pathlib import Path

import pytest

from benchmarks._numbers import Goal, Row, Section, page

PAGE = Path(__file__).parents[1] / "docs" / "numbers.md"


def test_the_page_is_current():
    assert PAGE.read_text() == page(), "python -m benchmarks.numbers --write docs/numbers.md"


@pytest.mark.parametrize(
    "value, bound, at_least, met",
    [
        (2.0, 2, False, True),
        (2.001, 2, False, False),
        (90, 90, True, True),
        (89.9, 90, True, False),
    ],
)
def test_a_goal_is_judged_before_rounding(value, bound, at_least, met):
    assert Goal(value, bound, at_least=at_least).is_met is met


def test_a_missed_goal_stands_above_all_sections_and_a_record_without_one_at_the_end(tmp_path):
    record = {"date": "2026-01-02", "jax": "0.10.2", "ratio": 3.0}
    (tmp_path / "steps.json").write_text(json.dumps(record))
    (tmp_path / "later.json").write_text(json.dumps({"command": "python -m later"}))
    rows = lambda record: [
        Row("slow", "3", goal=Goal(record["ratio"], 2)),
        Row("fast", "3", goal=Goal(record["ratio"], 4)),
    ]
    section = Section("Steps", "steps", "python -m steps", "A step.", "", rows)
    text = page(tmp_path, [section])
    missed, _, tables = text.partition("## Steps")
    assert "| Steps | slow | 3 | ≤ 2 |" in missed
    assert "fast" not in missed
    assert "1 of 2 goals were reached" in missed
    assert "`python -m steps` · 2026-01-02 · jax 0.10.2" in tables
    assert "| fast | 3 | ≤ 4 | yes |" in tables
    assert "| slow | 3 | ≤ 2 | **no** |" in tables
    assert "`python -m later`" in tables.partition("## Other records")[2]
