"""The guard of cost names what is above its bound."""

import itertools
import json
import subprocess
import sys

import pytest

from benchmarks import quick


def test_ratios_are_of_the_least_cpu_times(monkeypatch):
    """Contestants that advance a clock by what they cost, and now and then by other work."""
    now, calls = [0.0], itertools.count()

    def costs(seconds):
        def run():
            now[0] += seconds + (next(calls) % 5 == 0)

        return run

    names = {name for pair in quick.RATIOS.values() for name in pair}
    runs = {name: costs({"factors": 3.0, "step": 5.0}.get(name, 2.0)) for name in names}
    monkeypatch.setattr(quick.time, "process_time", lambda: now[0])
    found = quick.measure(runs, 3)
    assert (found["factors"], found["step"], found["adapters"]) == (1.5, 2.5, 1.0)


def test_a_ratio_above_half_as_much_again_is_named():
    recorded = {"factors": 2.0, "step": 2.0}
    assert quick.exceeded({"factors": 3.0, "step": 2.9}, recorded) == []
    (line,) = quick.exceeded({"factors": 3.1, "step": 2.9}, recorded)
    assert line == "factors: 3.1, above 3 (1.5 x the record's 2)"
    assert "no record" in quick.exceeded({"new": 0.1}, recorded)[0]
    assert quick.exceeded({"factors": float("nan")}, recorded)


def test_the_record_has_every_ratio():
    assert json.loads(quick.RECORD.read_text())["ratios"].keys() == quick.RATIOS.keys()


@pytest.mark.exhaustive
def test_every_contestant_runs():
    command = [sys.executable, "-m", "benchmarks.quick", "--rounds", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "decomposition" in done.stdout, done.stderr
