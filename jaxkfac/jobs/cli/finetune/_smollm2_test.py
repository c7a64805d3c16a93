"""The default run, cut short: the real model, from the package index or the cache."""

import json

import pytest

from jaxkfac.jobs.cli import main


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.standard_promotion
def test_smollm2_learns_from_few_updates(tmp_path, smollm2_file):
    words = ["--steps", "8", "--questions", "8", "--samples", "1", "--warmup", "0"]
    assert main(["finetune", "--output", str(tmp_path), *words]) == 0
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    losses = metrics["records"]["losses"]
    assert sum(losses[-3:]) < 0.5 * sum(losses[:3])
    assert len(metrics["records"]["exams"][-1]["correct"]["sum"]) == 8
