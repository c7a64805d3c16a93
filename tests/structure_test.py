"""The inside is open to a stranger: what `python -m benchmarks.structure` counts stays so."""

import pytest

from benchmarks.structure import house, sources


@pytest.mark.slow
def test_doors_and_kinds_stay_as_they_are_recorded():
    counted = sources()
    assert counted["of private modules"] == 0
    assert counted["in files"] == 1
    assert counted["comparisons of a layer's kind with a string"] <= 8
    assert counted["class names of more than one class"] == []


@pytest.mark.slow
def test_the_house_stays_as_it_is_recorded():
    counted = house()
    percent = lambda name: float(counted[name].rstrip("%"))
    # 330, and three for the object of training, mapped axes, and updates on them.
    assert counted["files"] <= 333 and counted["median code lines"] >= 110
    assert percent("below 40 code lines, __init__ left out") <= 3
    assert counted["circles of files"] == []
    assert percent("vague names") <= 3
    assert percent("parameters typed Any, PyTree or not") <= 7
    largest = lambda name: int(counted[name].split()[0])
    assert largest("longest function") <= 120
    assert largest("largest complexity") <= 20
    assert largest("largest door") <= 40
