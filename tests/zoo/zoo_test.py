"""Every program of the zoo: coverage as its row says, gradient and factors of brute force."""

import pytest

from tests.zoo import Program, all_programs
from tests.zoo.__main__ import PAGE, table
from tests.zoo._program import (
    check_agreement,
    check_compiled_once,
    check_coverage,
    check_factors,
)

ROWS = all_programs()
# XLA:CPU converts to eight bits by way of float16.
NARROW = {name: [pytest.mark.float16] if "fp8" in name else [] for name in ROWS}
HERE = [
    pytest.param(row, id=name, marks=NARROW[name]) for name, row in ROWS.items() if row.available
]
FAMILIES = {row.family: name for name, row in reversed(ROWS.items()) if row.available}
NUMBERS = [
    pytest.param(
        row,
        id=name,
        marks=NARROW[name] + [pytest.mark.exhaustive] * (FAMILIES[row.family] != name),
    )
    for name, row in ROWS.items()
    if row.available
]


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.standard_promotion
@pytest.mark.parametrize("row", HERE)
def test_coverage_is_what_the_row_says(row: Program, x64):
    check_coverage(row, row.build())


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.standard_promotion
@pytest.mark.parametrize("row", HERE)
def test_the_table_lists_problems_exactly_where_the_statistics_raise(row: Program, x64):
    check_agreement(row.build())


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.standard_promotion
@pytest.mark.parametrize("row", NUMBERS)
def test_the_second_step_compiles_nothing(row: Program, x64):
    check_compiled_once(row, row.build())


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.standard_promotion
@pytest.mark.parametrize("row", NUMBERS)
def test_value_gradient_and_factors(row: Program, x64):
    check_factors(row, row.build())


def test_the_page_shows_every_row():
    assert PAGE.read_text() == table(), "run: python -m tests.zoo --write"
