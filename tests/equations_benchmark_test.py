"""The page of equations shows the last errors of its record."""

from pathlib import Path

from benchmarks import equations

ROOT = Path(__file__).parent.parent


def test_the_table_of_the_page_is_that_of_the_record():
    record = equations._read()
    assert equations.table(record) in (ROOT / "docs" / "equations.md").read_text()
    for name in equations.EQUATIONS:
        for method, entry in equations.METHODS.items():
            expected = 0 if entry.only and name not in entry.only else len(equations.SEEDS)
            assert len(equations.seed_runs(record, name, method)) == expected, (name, method)
