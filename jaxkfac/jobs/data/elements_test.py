"""The table agrees with itself and with what is known; questions and records do not overlap."""

import itertools
import json

import pytest

from jaxkfac.jobs.data.choices import read_questions
from jaxkfac.jobs.data.elements import element_questions, element_records, load_elements

ELEMENTS = load_elements()
BY_SYMBOL = {e.symbol: e for e in ELEMENTS}


def test_there_are_118_with_their_own_numbers_symbols_and_names():
    assert [e.number for e in ELEMENTS] == list(range(1, 119))
    assert len({e.symbol for e in ELEMENTS}) == len({e.name for e in ELEMENTS}) == 118
    assert all(e.symbol.isalpha() and e.symbol == e.symbol.capitalize() for e in ELEMENTS)
    assert all(e.name.isalpha() and e.name.islower() for e in ELEMENTS)


@pytest.mark.parametrize(
    ("category", "symbols"),
    [
        ("noble gas", "He Ne Ar Kr Xe Rn"),
        ("halogen", "F Cl Br I At"),
        ("alkali metal", "Li Na K Rb Cs Fr"),
        ("alkaline earth metal", "Be Mg Ca Sr Ba Ra"),
        ("lanthanide", "La Ce Pr Nd Pm Sm Eu Gd Tb Dy Ho Er Tm Yb Lu"),
        ("actinide", "Ac Th Pa U Np Pu Am Cm Bk Cf Es Fm Md No Lr"),
        ("metalloid", "B Si Ge As Sb Te"),
        ("nonmetal", "H C N O P S Se"),
    ],
)
def test_the_families_are_complete(category, symbols):
    assert [e.symbol for e in ELEMENTS if e.category == category] == symbols.split()


def test_a_noble_gas_ends_every_period():
    last = [e for e, after in itertools.pairwise(ELEMENTS) if after.period > e.period]
    assert [e.symbol for e in last] == "He Ne Ar Kr Xe Rn".split()
    assert all(e.group == 18 for e in (*last, ELEMENTS[-1]))


def test_groups_rise_within_a_period_and_only_the_f_block_has_none():
    for period in range(1, 8):
        groups = [e.group for e in ELEMENTS if e.period == period and e.group]
        assert groups == sorted(set(groups))
    without = {e.category for e in ELEMENTS if e.group is None}
    assert without == {"lanthanide", "actinide"}


@pytest.mark.parametrize(
    ("symbol", "expected"),
    [
        ("H", (1, "hydrogen", 1, 1, "gas")),
        ("Fe", (26, "iron", 8, 4, "solid")),
        ("Br", (35, "bromine", 17, 4, "liquid")),
        ("Ag", (47, "silver", 11, 5, "solid")),
        ("W", (74, "tungsten", 6, 6, "solid")),
        ("Au", (79, "gold", 11, 6, "solid")),
        ("Hg", (80, "mercury", 12, 6, "liquid")),
        ("Pb", (82, "lead", 14, 6, "solid")),
        ("U", (92, "uranium", None, 7, "solid")),
        ("Og", (118, "oganesson", 18, 7, "unknown")),
    ],
)
def test_known_samples(symbol, expected):
    e = BY_SYMBOL[symbol]
    assert (e.number, e.name, e.group, e.period, e.state) == expected


def test_gases_and_liquids():
    gases = [e.symbol for e in ELEMENTS if e.state == "gas"]
    assert gases == "H He N O F Ne Cl Ar Kr Xe Rn".split()
    assert [e.symbol for e in ELEMENTS if e.state == "liquid"] == ["Br", "Hg"]


@pytest.mark.slow
def test_no_question_is_asked_in_a_records_words_and_every_answer_is_taught():
    records = element_records()
    taught = {r.messages[-2].content for r in records}
    answers = {r.messages[-1].content for r in records}
    for question in element_questions(456):
        assert question.stem not in taught
        assert question.choices[question.answer] in answers
        assert len(set(question.choices)) == 4


@pytest.mark.slow
def test_questions_are_right_by_the_table():
    checked = 0
    for question in element_questions(456):
        symbol, kind = question.id.split("-")
        e = BY_SYMBOL[symbol]
        right = (e.symbol, e.name.capitalize(), str(e.number), e.category)[int(kind)]
        checked += question.choices[question.answer] == right
    assert checked == 456


def test_a_seed_fixes_the_questions_and_answers_lie_anywhere():
    assert element_questions(30, seed=1) == element_questions(30, seed=1)
    assert element_questions(30, seed=1) != element_questions(30, seed=2)
    assert {q.answer for q in element_questions(40)} == {0, 1, 2, 3}
    with pytest.raises(ValueError, match="1 .. "):
        element_questions(0)


def test_questions_survive_their_file_format(tmp_path):
    questions, path = element_questions(5), tmp_path / "test.jsonl"
    path.write_text("\n".join(json.dumps(q.to_plain()) for q in questions))
    assert read_questions(path) == questions


def test_the_system_speaks_first_where_asked():
    assert [m.role for m in element_records(system="Be brief.")[0].messages] == [
        "system", "user", "assistant",
    ]  # fmt: skip
