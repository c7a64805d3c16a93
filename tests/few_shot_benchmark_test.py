"""The page of the few-shot job says what its record says."""

import json

from benchmarks.few_shot import RESULTS, page

RECORD = RESULTS / "few_shot.json"
MADE_UP = {
    "date": "2026-01-02",
    "jax": "0.0.1",
    "cores": 2,
    "load_before": 0.25,
    "options": ["--epochs", "1"],
    "bytes": "queries  MiB\n     16  1.5\n",
    "job": {
        "losses": [1.0],
        "validation": [0.5],
        "novel": 0.875,
        "interval": 0.0625,
        "episodes": 600,
        "seconds": 12.4,
        "cpu_seconds": 20.6,
        "peak_MiB": 700.2,
    },
}


def test_every_number_of_a_record_stands_on_its_page():
    text = page(MADE_UP)
    for words in (
        "`python examples/fewshot.py --epochs 1`, 2026-01-02, JAX 0.0.1, 2 cores, load 0.25",
        "over 600 novel episodes 87.50% ± 6.25%",
        "validation by epoch 50.0%",
        "12 s on the wall, 21 s of CPU time",
        "at most 700 MiB resident",
        "     16  1.5",
    ):
        assert words in text


def test_the_page_is_made_of_the_record():
    assert page(json.loads(RECORD.read_text())) == RECORD.with_suffix(".md").read_text()
