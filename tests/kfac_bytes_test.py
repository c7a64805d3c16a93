"""The page's table of large K-FAC trainings is the record, and the record what is planned now."""

import json
from pathlib import Path

import pytest

from benchmarks.kfac_bytes import AUTOENCODER, LAYOUTS, MIB, OPTIONS, planned
from benchmarks.optimizer_steps import Ours, problem

ROOT = Path(__file__).parent.parent
RECORD = json.loads((ROOT / "benchmarks" / "results" / "kfac_bytes.json").read_text())
SIZES = {"llama-1b": "1B", "llama-7b": "7B"}


def test_the_page_shows_the_record():
    page = (ROOT / "docs" / "memory.md").read_text()
    for layout in LAYOUTS:
        assert RECORD[layout].keys() == OPTIONS.keys()
        for name, row in RECORD[layout].items():
            cells = [f"{SIZES[layout]}, {name}", *(f"{value:.1f}" for value in row.values())]
            assert f"| {' | '.join(cells)} |" in page, name


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPTIONS)
def test_the_record_is_what_is_planned_today(layout, name):
    assert planned(layout, **OPTIONS[name]) == pytest.approx(RECORD[layout][name], rel=1e-6)


def test_the_packed_state_takes_half_of_kfac_jaxs():
    record = RECORD[AUTOENCODER]
    assert record["packed_mib"] / record["peer_mib"] == record["packed_over_peer"] <= 0.55


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "packed"), [("dense_mib", False), ("packed_mib", True)])
def test_the_recorded_state_is_that_of_today(name, packed):
    """The peer's bytes are only in the record: it needs an environment of its own."""
    assert (
        Ours(problem(), "fixed", packed=packed).curvature_bytes / MIB == RECORD[AUTOENCODER][name]
    )
