"""The page of atoms shows the table of its record, of which no part is missing."""

import json
from pathlib import Path

from benchmarks import atoms

ROOT = Path(__file__).parent.parent


def test_the_table_of_the_page_is_that_of_the_record():
    record = json.loads(atoms.RECORD.read_text())
    assert atoms.table(record) in (ROOT / "docs" / "atoms.md").read_text()
    every = {f"{method}:{seed}" for method in atoms.METHODS for seed in range(atoms.SEEDS)}
    assert set(record["parts"]) == every
    exact = atoms.example().SYSTEMS[atoms.SYSTEM].exact
    assert atoms.summary(record["parts"], exact) == record["summary"]
