"""The inside is open to a stranger: what `python -m benchmarks.structure` counts stays so."""

import ast
import dataclasses
import typing

import pytest

from benchmarks import structure
from benchmarks.structure import (
    LIBRARY,
    circles_of_files,
    circles_of_rooms,
    house,
    names_layout,
    sources,
)
from jaxkfac.interception import Kind, Use
from jaxkfac.interception.values import View


def trees(**files):
    """Modules of the library by ``room__module``."""
    place = lambda name: LIBRARY / (name.replace("__", "/_", 1) + ".py")
    return {place(name): ast.parse(text) for name, text in files.items()}


INSIDE = "def f():\n    with a():\n        from jaxkfac.{} import {}"


def test_an_import_inside_a_function_closes_a_circle():
    planted = trees(low__a="from jaxkfac.low._b import g", low__b=INSIDE.format("low._a", "f"))
    assert circles_of_files(planted) == [{"jaxkfac.low._a", "jaxkfac.low._b"}]
    straight = trees(low__a="from jaxkfac.low._b import g", low__b="import jax")
    assert circles_of_files(straight) == []


def test_a_circle_passes_through_the_door_of_a_package():
    planted = trees(low__a=INSIDE.format("high", "g"), high__b="from jaxkfac.low._a import f")
    planted[LIBRARY / "high" / "__init__.py"] = ast.parse("from jaxkfac.high._b import g")
    (circle,) = circles_of_files(planted)
    assert circle == {"jaxkfac.low._a", "jaxkfac.high._b", "jaxkfac.high.__init__"}


def test_rooms_close_a_circle_where_their_files_close_none():
    planted = trees(low__a=INSIDE.format("high._b", "g"), low__c="", high__b="")
    assert circles_of_rooms(planted) == []
    planted |= trees(high__d="import jaxkfac.low._c")
    assert circles_of_files(planted) == []
    assert circles_of_rooms(planted) == [{"low", "high"}]


def test_imports_for_the_type_checker_close_no_circle():
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from jaxkfac.low._a import f"
    back = "from jaxkfac.low._b import g"
    assert circles_of_files(trees(low__a=back, low__b=typed)) == []
    otherwise = f"{typed}\nelse:\n    from jaxkfac.low._a import f"
    assert len(circles_of_files(trees(low__a=back, low__b=otherwise))) == 1


@pytest.mark.parametrize(
    "code",
    ["x.a_sums", "f(g_sums=1)", "def unfolded(): ...", "from m import is_packed as p", "a_counts"],
)
def test_names_of_the_layout_are_those_of_the_code(code):
    assert names_layout(ast.parse(code))
    assert not names_layout(ast.parse(f"'{code}'  # {code}\ny = sums"))


def test_a_missing_ruff_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="pip install ruff"):
        structure._ruff()


@pytest.mark.slow
def test_doors_and_kinds_stay_as_they_are_recorded():
    counted = sources()
    assert counted["of private modules"] == 0
    assert counted["in files"] == 1
    assert counted["comparisons of a layer's kind with a string"] <= 8
    assert counted["class names of more than one class"] == []


def test_the_records_of_a_use_stay_small():
    for record in (Use, View):
        assert len(dataclasses.fields(record)) <= 9 and record.__dataclass_params__.frozen
    attributes = {name for name in typing.get_type_hints(Kind) if not name.startswith("_")}
    methods = {name for name in vars(Kind) if not name.startswith("_")} - attributes
    assert len(attributes) <= 9 and len(methods) <= 9


@pytest.mark.slow
def test_the_house_stays_as_it_is_recorded():
    counted = house()
    percent = lambda name: float(counted[name].rstrip("%"))
    # 330, three for the object of training, mapped axes, and updates on them, one for sides,
    # and four for Gram matrices: taps, rows, plan, operator. Six for a step in sample space: the
    # door, readings and products of rows; the optimizer, drawn rows and their tests. Two for
    # layers that a user names: the call, and the base of their kinds. One for the interpreter.
    assert counted["files"] <= 349 and counted["median code lines"] >= 110
    assert percent("below 40 code lines, __init__ left out") <= 3
    assert counted["circles of files"] == [] and counted["circles of rooms"] == []
    assert percent("vague names") <= 3
    assert percent("parameters typed Any, PyTree or not") <= 7
    largest = lambda name: int(counted[name].split()[0])
    assert largest("longest function") <= 120
    assert largest("largest complexity") <= 20
    assert largest("largest door") <= 40
