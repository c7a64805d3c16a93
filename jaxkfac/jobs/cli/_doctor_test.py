"""`jaxkfac doctor` prints what it found, for people and for programs."""

import json
import os
from pathlib import Path

from jaxkfac.jobs.cli._inspect import run_doctor
from jaxkfac.jobs.cli._inspect_options import DoctorArguments


def test_json_holds_findings_and_versions(capsys, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
    run_doctor(DoctorArguments(json=True))
    record = json.loads(capsys.readouterr().out)
    assert record["findings"][0]["topic"] == "backends"
    assert {"topic", "value", "advice", "problem"} == record["findings"][0].keys()
    assert record["versions"]["jax"]
    assert (Path(__file__).parents[3] / record["page"]).is_file()
    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "true"


def test_table_marks_problems(capsys, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")
    monkeypatch.setenv("COLUMNS", "160")
    run_doctor(DoctorArguments())
    shown = capsys.readouterr().out
    assert "Doctor" in shown and "versions: python" in shown
    assert "docs/troubleshooting.md" in shown
    if "default cpu" in shown:
        assert "1 problems" in shown and "jaxkfac[gpu]" in shown
