"""No public name of jaxkfac without a parity case or a stated reason."""

import importlib
import pkgutil

import pytest

import jaxkfac
from parity_tests.cases import Case, Tolerance, cases, exact, over
from parity_tests.compare import Pair, ParityError, furthest
from parity_tests.models import PROBLEMS
from parity_tests.reasons import NAMES, PACKAGES
from parity_tests.tables import every_case


def _public() -> dict[str, str]:
    """``{name: package}`` of every public name, the packages excused as a whole left out."""
    packages = ["jaxkfac"]
    for module in pkgutil.walk_packages(jaxkfac.__path__, "jaxkfac."):
        if module.ispkg and "._" not in module.name and module.name != "jaxkfac.jobs":
            packages.append(module.name)
    excused = tuple(PACKAGES) + tuple(f"{package}." for package in PACKAGES)
    found: dict[str, str] = {}
    for package in packages:
        if package in PACKAGES or package.startswith(excused):
            continue
        for name in importlib.import_module(package).__all__:
            found.setdefault(name, package)
    return found


def _is_excused(name: str) -> bool:
    """Whether a name at the top is a package, or comes from one, that is excused as a whole."""
    value = getattr(jaxkfac, name, None)
    where = getattr(value, "__module__", None) or getattr(value, "__name__", "")
    return any(f"{where}.".startswith(f"{package}.") for package in PACKAGES)


COVERED = {name for case in every_case() for name in case.covers}


@pytest.mark.default(144)
@pytest.mark.parametrize("name", sorted(_public()))
def test_name_has_a_case_or_a_reason(name: str):
    if name not in COVERED and not _is_excused(name):
        assert name in NAMES, (
            f"{_public()[name]}.{name} has no parity case: add one that covers it to a table of "
            "parity_tests/, or say in parity_tests/reasons.py why there is none"
        )


def test_cases_cover_names_that_exist():
    assert _public().keys() >= COVERED


def test_reasons_are_of_names_that_exist():
    assert _public().keys() >= NAMES.keys()


def test_what_a_model_brings_is_claimed_by_cases_of_such_models_alone():
    brought = {name for problem in PROBLEMS.values() for name in problem.covers}
    assert brought >= {"Categorical", "Gaussian", "Bernoulli", "mark_rows", "from_nnx"}
    for case in every_case():
        if case.problem in PROBLEMS:
            assert brought & {*case.covers} <= {*PROBLEMS[case.problem].covers}, str(case)


def test_no_name_has_both_a_case_and_a_reason():
    assert not COVERED & NAMES.keys()
    assert all(NAMES.values()) and all(PACKAGES.values())


def test_there_are_enough_cases_and_no_two_of_one_name():
    names = [str(case) for case in every_case()]
    assert len(names) == len(set(names))
    on_cpu = [case for case in every_case() if case.device == "cpu"]
    assert len(on_cpu) >= 150
    assert {str(case).removesuffix("cpu") for case in on_cpu} <= {
        name.removesuffix("gpu") for name in names if name.endswith("gpu")
    }
    assert any(case.tf32 for case in every_case())


# ---------------------------------------------------------------- the tables refuse


def _nothing(sides) -> list[Pair]:
    return []


def test_case_without_a_tolerance_cannot_be_built():
    with pytest.raises(ValueError, match="part: name states no tolerance"):
        cases("part", "name", "classifier", _nothing, tolerances=None)
    for bad in (0.0, float("nan"), float("inf"), 2.0):
        with pytest.raises(ValueError, match="expected a tolerance"):
            cases(
                "part", "name", "classifier", _nothing, tolerances={"float64": Tolerance(bad, "x")}
            )
    with pytest.raises(ValueError, match="needs its reason"):
        Case("part", "name", "classifier", _nothing, (), "float64", 1e-3, "")


def test_two_cases_of_one_name_cannot_be_in_a_table():
    table = cases("part", "name", "classifier", _nothing, tolerances=exact())
    with pytest.raises(ValueError, match="of one name"):
        over([*table, *table])


def test_difference_in_shape_names_the_layer_and_both_shapes():
    pair = Pair("up/kernel", "A", [[1.0, 2.0]], [1.0])
    with pytest.raises(
        ParityError, match=r"'up/kernel', A: jaxkfac has the shape \(1, 2\).*\(1,\)"
    ):
        furthest([pair])


def test_nothing_to_compare_and_what_is_not_finite_are_no_agreement():
    with pytest.raises(ParityError, match="nothing to compare"):
        furthest([])
    assert furthest([Pair("x", "A", [float("nan")], [1.0])]).error == float("inf")
    assert furthest([Pair("x", "A", [float("nan")], [float("nan")])]).error == float("inf")
    assert furthest([Pair("x", "A", [float("inf"), 1.0], [float("inf"), 1.0])]).error == 0
    assert furthest([Pair("x", "A", [1.5], [1.0])]).digits == pytest.approx(0.30103)
