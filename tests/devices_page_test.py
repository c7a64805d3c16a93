"""``docs/devices.md``: its numbers of a 7B model, and its recipes on two devices."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.devices import SIDES, Constants, seconds, table
from tests.readme_test import script

PAGE = (Path(__file__).parents[1] / "docs" / "devices.md").read_text()


def test_the_page_has_the_table_that_the_command_prints():
    assert "python -m benchmarks.devices" in PAGE
    assert "\n".join(table(Constants())) in PAGE


def test_divided_decompositions_take_their_share_and_the_largest_one():
    constants = Constants()
    one, many = seconds(1, constants), seconds(8, constants)
    largest = max(SIDES) ** 3 * constants.eigh / constants.refresh_every
    assert many[4] == pytest.approx(one[3] / 8 + largest)
    assert many[0] == pytest.approx(one[0] / 8)


@pytest.mark.exhaustive
def test_the_recipes_run_on_two_devices(tmp_path):
    """``readme_test`` runs them on one."""
    program = tmp_path / "devices.py"
    program.write_text(script(PAGE))
    root = str(Path(__file__).parents[1])
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "2", "PYTHONPATH": root}
    command = [sys.executable, program.name]
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stderr
