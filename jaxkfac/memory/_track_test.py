"""Peaks belong to the stage that made them, and say when they are only bounds."""

import json
import os
import subprocess
import sys

import pytest

from jaxkfac.memory import Peak, track
from jaxkfac.memory import _budget as resident
from jaxkfac.memory import _track as tracking

PROBE = """
import gc, json
import numpy as np
from jaxkfac.memory import track

def use(mib):
    np.ones(mib * 2**20, np.uint8)  # written, so resident; freed at once

gc.disable()
use(1)
with track("run") as run:
    with track("big"):
        use(96)
        with track("inside"):
            use(48)
    with track("small"):
        use(16)
print(json.dumps(run.to_dict()))
"""


@pytest.mark.slow
def test_each_stage_has_its_own_peak_and_the_outer_one_the_highest():
    if not resident.lower_mark():
        pytest.skip("this system keeps no high-water mark that can be lowered")
    # A process of its own: what others freed is not reused, nor freed in between. Without the
    # variable glibc would serve the 16 MiB from the heap that the 96 have left.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1048576", "JAX_PLATFORMS": "cpu"}
    probe = subprocess.run(
        [sys.executable, "-c", PROBE], env=env, capture_output=True, text=True, check=True
    )
    run = json.loads(probe.stdout)
    big, small = run["stages"]
    (inside,) = big["stages"]
    assert [stage["name"] for stage in (run, big, inside, small)] == [
        "run",
        "big",
        "inside",
        "small",
    ]

    def rise(stage):
        assert stage["resident_peak"]["exact"]
        return (stage["resident_peak"]["nbytes"] - stage["resident_before"]) / 2**20

    assert 94 < rise(big) < 106 and 94 < rise(run) < 106
    assert 46 < rise(inside) < 58 and 14 < rise(small) < 26
    assert run["seconds"] >= big["seconds"] + small["seconds"]


def test_a_mark_that_cannot_be_lowered_gives_bounds_below_earlier_peaks(monkeypatch):
    monkeypatch.setattr(tracking, "lower_mark", lambda: False)
    readings = {"mark": 500, "now": 100}
    monkeypatch.setattr(tracking, "resident_mark", lambda: readings["mark"])
    monkeypatch.setattr(tracking, "resident_bytes", lambda: readings["now"])
    with track("hidden") as hidden:
        readings["now"] = 150
    with track("highest") as highest:
        readings["mark"] = 700
    assert hidden.resident_peak == Peak(150, exact=False) and str(hidden.resident_peak) == "≥ 150 B"
    assert highest.resident_peak == Peak(700, exact=True)


def test_devices_peak_is_exact_only_where_it_is_the_highest_so_far(monkeypatch):
    stats = {"bytes_in_use": 10, "peak_bytes_in_use": 50}

    class Device:
        def memory_stats(self):
            return dict(stats)

        def __str__(self):
            return "gpu:0"

    monkeypatch.setattr(tracking.jax, "local_devices", lambda: [Device()])
    with track("run") as run:
        with track("low") as low:
            stats["bytes_in_use"] = 30
        with track("high") as high:
            stats.update(bytes_in_use=20, peak_bytes_in_use=80)
    assert low.device_peaks == {"gpu:0": Peak(30, exact=False)}
    assert high.device_peaks == run.device_peaks == {"gpu:0": Peak(80, exact=True)}
    assert high.device_before == {"gpu:0": 30}
    header, first, second, _ = str(run).splitlines()
    assert header.split()[-1] == "gpu:0"
    assert first.endswith(" 80 B") and second.endswith("≥ 30 B")


def test_a_failed_stage_is_complete_and_the_next_is_not_inside_it():
    with pytest.raises(ZeroDivisionError), track("fails") as failed:
        1 / 0  # noqa: B018
    with track("next") as after:
        pass
    assert failed.seconds > 0 and failed.stages == [] and after.name == "next"


def test_stages_are_plain_records():
    with track("run") as run, track("part"):
        pass
    plain = json.loads(json.dumps(run.to_dict()))
    assert plain["stages"][0]["name"] == "part"
    assert str(run).splitlines()[2].split()[0] == "part"
    assert [row[0] for row in run.table()] == ["stage", "run", "\N{NO-BREAK SPACE}" * 2 + "part"]


def test_systems_without_the_kernels_files_say_unknown(tmp_path, monkeypatch):
    monkeypatch.setattr(resident, "_STATUS", tmp_path / "nothing")
    monkeypatch.setattr(resident, "_CLEAR", tmp_path / "nowhere" / "nothing")
    with track("run") as run:
        pass
    assert run.resident_peak is None and "unknown" in str(run)


def test_a_kernel_that_ignores_the_reset_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(resident, "_CLEAR", tmp_path / "ignored")
    monkeypatch.setattr(resident, "_STATUS", tmp_path / "status")
    (tmp_path / "status").write_text("Name: x\nVmHWM:\t  90000 kB\nVmRSS:\t   1000 kB\n")
    assert not resident.lower_mark()
    assert resident.resident_mark() == 90000 * 1024
