"""What ``docs/devices.md`` says of a 7B model is what its command prints."""

from pathlib import Path

import pytest

from benchmarks.devices import SIDES, Constants, seconds, table

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
