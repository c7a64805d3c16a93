"""The record of the documents is complete and current; its verdicts follow from its numbers."""

import ast
import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from benchmarks import documents
from benchmarks._documents import CLAIMS, Context, Measured, judge
from benchmarks._documents._rules import (
    Agrees,
    Lies,
    Occurs,
    OnGPU,
    Removed,
    Saves,
    Slows,
    Unchanged,
)
from benchmarks._documents._table import TITLES, page_text, record_text

ROOT = Path(__file__).parent.parent
RECORD = json.loads((ROOT / "benchmarks" / "results" / "documents.json").read_text())
CPU = Context("cpu", {})


def test_every_document_is_answered_and_few_rows_wait_for_a_gpu():
    names = [claim.name for claim in CLAIMS]
    assert len(names) == len(set(names)) >= 45
    assert {name.split("/")[0] for name in names} == set(TITLES)
    assert sum(isinstance(claim.rule, OnGPU) for claim in CLAIMS) <= 8


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
        found = {judge(claim, Measured(1.0, after), None).verdict for after in (0.0, 1.0)}
        assert found == {"true", "false"}
        return
    measured = Measured(**row["torch"])
    assert judge(claim, measured, None).verdict == row["verdict"] == claim.expected
    flipped = judge(claim, other(claim.rule, measured), None)
    assert flipped.verdict != row["verdict"]
    assert flipped.reason.startswith("Otherwise than expected")


COUNTED = [claim for claim in CLAIMS if not claim.alone and not isinstance(claim.rule, OnGPU)]
PLANNED = {"flan-t5-xl/activations-8gb", "flan-t5-xl/total-28gb", "flan-t5-xl/margin-4gb"}


@pytest.mark.sampled(12)
@pytest.mark.slow
@pytest.mark.parametrize("claim", COUNTED, ids=lambda claim: claim.name)
def test_what_is_counted_is_what_was_recorded(claim):
    if claim.needs or claim.name in PLANNED:
        assert claim.expected == next(
            row["verdict"] for row in RECORD["claims"] if row["name"] == claim.name
        )
        return
    found = claim.torch(CPU)
    row = next(row for row in RECORD["claims"] if row["name"] == claim.name)
    assert judge(claim, found, None).verdict == row["verdict"]
    for side in ("before", "after"):
        recorded = row["torch"][side]
        assert getattr(found, side) == (
            None if recorded is None else pytest.approx(recorded, rel=0.05, abs=1e-5)
        )


def test_the_tables_are_those_of_the_record():
    results = ROOT / "benchmarks" / "results"
    assert (results / "documents.md").read_text() == record_text(RECORD)
    assert (ROOT / "docs" / "documents.md").read_text() == page_text(RECORD)
    assert [row["name"] for row in RECORD["claims"]] == [claim.name for claim in CLAIMS]


def test_budgets_name_the_rows_that_the_documents_forgot():
    first, second = RECORD["budgets"]
    forgotten = [name for name, claimed, planned in second["rows"] if claimed is None and planned]
    assert "accumulation" in forgotten
    assert {name for name, claimed, _ in first["rows"] if claimed} >= {"factors", "optimizer"}


@pytest.mark.slow
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
        (["--claims", "clipping/transpose", "--write"], "a part of them is no record"),
        (["--claims", "no/such"], "no such claims: ['no/such']"),
    ],
)
def test_a_part_is_not_written_and_an_unknown_claim_is_refused(words, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["documents", *words])
    with pytest.raises(SystemExit, match="2"):
        documents.main()
    assert message in capsys.readouterr().err
