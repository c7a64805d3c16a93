"""The record of the documents is complete and current; its verdicts follow from its numbers."""

import ast
import copy
import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import jax

from benchmarks import documents
from benchmarks._documents import _budgets
from benchmarks._documents._claim import Context, Measured, judge
from benchmarks._documents._record import (
    differences,
    recorded_lengths,
    recounted,
)
from benchmarks._documents._rules import (
    Agrees,
    AtLeast,
    Lies,
    Occurs,
    OnGPU,
    Removed,
    Saves,
    Slows,
    Unchanged,
)
from benchmarks._documents._sources import source_marks
from benchmarks._documents._table import TITLES, page_text, record_text
from benchmarks._documents.claims import CLAIMS

ROOT = Path(__file__).parent.parent
RECORD = json.loads((ROOT / "benchmarks" / "results" / "documents.json").read_text())
CPU = Context("cpu", {}, recorded_lengths(RECORD))


def test_every_document_is_answered_and_few_rows_wait_for_a_gpu():
    names = [claim.name for claim in CLAIMS]
    assert len(names) == len(set(names)) >= 45
    assert {name.split("/")[0] for name in names} == set(TITLES)
    assert sum(isinstance(claim.rule, OnGPU) for claim in CLAIMS) <= 9


def test_every_fault_that_is_kept_is_measured():
    tree = ast.parse((ROOT / "torch_ref" / "unfixed" / "__init__.py").read_text())
    (exported,) = (ast.literal_eval(x.value) for x in tree.body if isinstance(x, ast.Assign))
    source = "".join(f.read_text() for f in (ROOT / "benchmarks" / "_documents").glob("*.py"))
    assert set(exported) == set(re.findall(r"unfixed\.(\w+)", source))


@pytest.mark.parametrize(
    ("rule", "cases"),
    [
        (
            Saves(0.75),
            [(100, 25, "true"), (100, 45, "partly"), (100, 90, "false"), (0, 0, "false")],
        ),
        (Lies(10, 20), [(9, 0, "true"), (22, 0, "true"), (30, 0, "partly"), (41, 0, "false")]),
        (AtLeast(10), [(9, 0, "true"), (90, 0, "true"), (5, 0, "partly"), (4.9, 0, "false")]),
        (Occurs(), [(1, 0, "true"), (0, 0, "false")]),
        (Removed(), [(8, 0, "true"), (8, 4, "partly"), (8, 8, "false"), (0, 0, "false")]),
        (Unchanged(), [(3, 3, "true"), (3, 3.1, "false")]),
        (Unchanged(0.1), [(3, 3.1, "true"), (3, 4, "false")]),
        (Agrees(1e-6), [(1e-7, 0, "true"), (1e-4, 0, "partly"), (0.5, 0, "false")]),
        (Slows(0.05), [(1, 1.04, "true"), (1, 1.12, "partly"), (1, 1.4, "false")]),
    ],
    ids=lambda value: type(value).__name__ if dataclasses.is_dataclass(value) else "",
)
def test_rules_decide_by_the_numbers(rule, cases):
    for before, after, expected in cases:
        assert rule.verdict(Measured(before, after)) == expected, (rule, before, after)


def other(rule, measured):
    """A measurement on the other side of the rule."""
    before, after, unit = measured
    match rule:
        case OnGPU():
            return other(rule.rule, measured)
        case Saves(share):
            saved = (before - after) / before >= 0.8 * share if before else False
            return Measured(1.0, 1.0 if saved else 0.0, unit)
        case Lies(low, high):
            inside = 0.9 * low <= before <= 1.1 * high
            return Measured(10 * high + 1 if inside else low, after, unit)
        case AtLeast(low):
            return Measured(0.0 if before >= 0.9 * low else low, after, unit)
        case Occurs():
            return Measured(0.0 if before >= 1 else 1.0, after, unit)
        case Removed():
            return Measured(1.0, 1.0 if before > 0 and after <= 0.01 * before else 0.0, unit)
        case Unchanged(within):
            same = abs(after - before) <= within * abs(before)
            return Measured(1.0, 3.0 if same else 1.0, unit)
        case Agrees(within):
            return Measured(1.0 if before <= within else 0.0, after, unit)
        case Slows():
            return Measured(1.0, 9.0 if after <= before * 1.08 else 1.0, unit)
    raise AssertionError(rule)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_recorded_verdict_follows_from_the_recorded_numbers_and_flips_with_them(claim):
    row = next(row for row in RECORD["claims"] if row["name"] == claim.name)
    if row["torch"] is None:
        assert isinstance(claim.rule, OnGPU) and row["verdict"] == "needs a GPU"
        assert f"--claims {claim.name}" in row["reason"]
        found = {judge(claim, Measured(1.0, after), None).verdict for after in (0.0, 1.0, 9.0)}
        assert found == {"true", "false"}
        return
    measured = Measured(**row["torch"])
    judged = judge(claim, measured, None, CPU)
    assert judged.verdict == row["verdict"] and claim.expected in (row["verdict"], None)
    if claim.holds:  # the document leaves an input open, and one number decides nothing
        assert judged.holds == row["holds"]
        return
    flipped = judge(claim, other(claim.rule, measured), None)
    assert flipped.verdict != row["verdict"]
    assert flipped.reason.startswith("Otherwise than expected")


MEASURED = [
    claim
    for claim in CLAIMS
    if claim.measured and not claim.alone and not isinstance(claim.rule, OnGPU)
]


# Under strict promotion the planner cannot trace the optimizer, and counts without its update.
as_users_run_it = pytest.mark.standard_promotion


def recounted_now():
    """The record, with all that follows by counting worked out here."""
    tokens = _budgets.TOKENS
    lengths = {**recorded_lengths(RECORD), tokens: _budgets.plan(_budgets.t5_xl_words(tokens))}
    return recounted(RECORD, lengths)


@pytest.mark.slow
@as_users_run_it
def test_verdicts_of_arithmetic_shapes_and_plans_are_those_of_today():
    """A difference is named. `python -m benchmarks.documents --counted --write` records it."""
    started = []
    listener = lambda event, seconds, **more: started.append(event)
    jax.monitoring.register_event_duration_secs_listener(listener)
    named = differences(RECORD, recounted_now())
    assert not named, "\n".join(named)
    assert not [event for event in started if "compile" in event and "trace" not in event]


@pytest.mark.slow
@as_users_run_it
def test_one_per_cent_of_any_planned_figure_is_a_difference(monkeypatch):
    recounted_now()  # the plans, which are kept
    plan = _budgets.plan
    for budget in _budgets.BUDGETS:
        for row in plan(budget.words)[budget.column]:

            def off(words, budget=budget, row=row):
                columns = copy.deepcopy(plan(words))
                if words == budget.words:
                    columns[budget.column][row] *= 1.01
                return columns

            monkeypatch.setattr(_budgets, "plan", off)
            named = differences(RECORD, recounted_now())
            monkeypatch.setattr(_budgets, "plan", plan)
            assert not plan(budget.words)[budget.column][row] or any(
                line.startswith(budget.title) for line in named
            ), (budget.title, row)


@pytest.mark.slow
@as_users_run_it
def test_a_verdict_that_a_plan_turns_is_named():
    claimed = {"parameters": 18 * 10**9, "activations": 8 * 10**9}  # and the document's 2 GB
    columns = {"now": claimed, "remat": claimed}
    lengths = dict.fromkeys(recorded_lengths(RECORD), columns)
    named = differences(RECORD, recounted(RECORD, lengths))
    assert any(line.startswith("flan-t5-xl/total-28gb, verdict:") for line in named)
    assert any(line.endswith("'true' now") for line in named)


@as_users_run_it
@pytest.mark.exhaustive
def test_plans_for_every_length_are_those_of_today():
    assert differences(RECORD, recounted(RECORD, _budgets.by_length())) == []


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("claim", MEASURED, ids=lambda claim: claim.name)
def test_what_is_measured_without_a_clock_is_what_was_recorded(claim):
    found = claim.torch(CPU)
    row = next(row for row in RECORD["claims"] if row["name"] == claim.name)
    assert judge(claim, found, None, CPU).verdict == row["verdict"]
    for side in ("before", "after"):
        recorded = row["torch"][side]
        assert getattr(found, side) == (
            None if recorded is None else pytest.approx(recorded, rel=0.05, abs=1e-5)
        )


@pytest.mark.slow
def test_the_tables_are_those_of_the_record():
    results = ROOT / "benchmarks" / "results"
    marks = source_marks(RECORD)
    command = "python -m benchmarks.documents --counted --write"
    assert (results / "documents.md").read_text() == record_text(RECORD, marks), command
    assert (ROOT / "docs" / "documents.md").read_text() == page_text(RECORD, marks), command
    assert [row["name"] for row in RECORD["claims"]] == [claim.name for claim in CLAIMS]


def test_budgets_name_the_rows_that_the_documents_forgot():
    first, second = RECORD["budgets"]
    forgotten = [name for name, claimed, planned in second["rows"] if claimed is None and planned]
    assert "accumulation" in forgotten
    assert {name for name, claimed, _ in first["rows"] if claimed} >= {"factors", "optimizer"}


@pytest.mark.exhaustive
def test_claims_can_be_measured_alone():
    words = ["--claims", "clipping/transpose", "kfac-7b/workspace-40gb"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.documents", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "clipping/transpose: false" in done.stdout
    assert "kfac-7b/workspace-40gb: false" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--claims", "clipping/transpose", "--counted"], "not allowed with argument"),
        (["--claims", "no/such"], "no such claims: ['no/such']"),
    ],
)
def test_words_that_contradict_and_unknown_claims_are_refused(words, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["documents", *words])
    with pytest.raises(SystemExit, match="2"):
        documents.main()
    assert message in capsys.readouterr().err
