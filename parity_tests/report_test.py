"""The report says what was compared, what failed, and what was skipped."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from parity_tests import gpu_record
from parity_tests.cases import cases, exact
from parity_tests.report import _Report, _summary, markdown, page
from parity_tests.schedule import group_of


def _record(**changes) -> dict:
    record = {
        "part": "factors",
        "name": "expand",
        "problem": "a <model>",
        "dtype": "float64",
        "device": "cpu",
        "error": 2e-16,
        "where": "up/kernel, A",
        "tolerance": 1e-10,
        "reason": "sums | products",
        "digits": 15.7,
        "passed": True,
    }
    return record | changes


RECORDS = [_record(), _record(part="powers", error=0.5, digits=0.3, passed=False)]
SUMMARY = _summary(RECORDS, {"needs a GPU": 3})


def test_summary_counts_cases_failures_and_skips():
    assert SUMMARY[0] == "2 cases compared, 1 beyond their tolerance."
    assert SUMMARY[1].startswith("float64: 2 cases, digits in common from 0.3 to 15.7")
    assert SUMMARY[-1] == "3 tests skipped: needs a GPU."


def _test_report(nodeid: str, outcome: Any, *, when: Any = "call", **record: Any):
    properties = [("parity", _record(**record))] if record else []
    place = (nodeid, None, nodeid)
    return pytest.TestReport(nodeid, place, {}, outcome, None, when, user_properties=properties)


def test_what_fails_without_a_line_in_a_table_is_named(tmp_path: Path):
    """By a shape that differs, an error in a case, its set-up or its tear-down, or an import."""
    report = _Report(tmp_path / "found")
    file = "parity_tests/x_test.py::"
    report.pytest_runtest_logreport(_test_report(f"{file}agrees", "passed", error=1e-16))
    report.pytest_runtest_logreport(_test_report(f"{file}is_far", "failed", error=0.5))
    report.pytest_runtest_logreport(_test_report(f"{file}raises", "failed"))
    report.pytest_runtest_logreport(_test_report(f"{file}raises", "failed", when="teardown"))
    report.pytest_runtest_logreport(_test_report(f"{file}set_up", "failed", when="setup"))
    for when, outcome in (("call", "passed"), ("teardown", "failed")):
        report.pytest_runtest_logreport(
            _test_report(f"{file}torn_down", outcome, when=when, error=1e-16)
        )
    report.pytest_runtest_logreport(_test_report("tests/x_test.py::raises", "failed"))
    report.pytest_collectreport(pytest.CollectReport("parity_tests/y_test.py", "failed", None, []))
    report.pytest_sessionfinish()
    lines = (tmp_path / "found.md").read_text().splitlines()
    assert "- 3 cases compared, 1 beyond their tolerance." in lines
    named = [line.rpartition(" ")[2] for line in lines if "not by a tolerance" in line]
    assert named == [
        *(f"{file}{name}." for name in ("raises", "set_up", "torn_down")),
        "parity_tests/y_test.py.",
    ]
    assert (tmp_path / "found.html").read_text().count("not by a tolerance") == len(named)


def test_markdown_has_a_table_for_each_part_and_marks_failures():
    text = markdown(RECORDS, SUMMARY)
    assert "\n## Branches on sizes, dtypes, devices and counts\n" in text
    assert "\n### jaxkfac/linalg/_gram.py\n" in text  # the list of thresholds, a level down
    assert "## factors" in text and "## powers" in text
    row, failed = (line for line in text.splitlines() if line.startswith("| expand"))
    assert "| 2.0e-16 | 1.0e-10 | 15.7 | up/kernel, A | sums \\| products |" in row
    assert failed.endswith("| FAILED |") and "FAILED" not in row


def test_page_escapes_and_needs_nothing_from_outside():
    text = page(RECORDS, SUMMARY)
    assert "a &lt;model&gt;" in text and text.count('<tr class="failed">') == 1
    assert "src=" not in text and "http" not in text


def test_cases_of_one_problem_and_dtype_run_on_one_worker():
    table = cases("part", "a, name", "conv2d", lambda sides: [], tolerances=exact())
    groups = {group_of(f"parity_tests/x_test.py::test_x[{case}]") for case in table}
    assert groups == {"conv2d, float64", "conv2d, float32"}
    assert group_of("parity_tests/report_test.py::test_a") == "parity_tests/report_test.py"
    faults = [f"parity_tests/faults_test.py::test_fault_is_caught[{n}]" for n in ("a", "b")]
    assert group_of(faults[0]) != group_of(faults[1])


@pytest.mark.exhaustive
def test_records_of_a_worker_reach_the_report(tmp_path: Path):
    """One case in another process, whose worker is yet another."""
    run = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "pytest",
                "parity_tests/lanczos_test.py",
                "-k",
                "few and steps",
                "-m",
                "",
            ),
            *("-p", "parity_tests.report", "--parity-report", str(tmp_path / "found"), "-n", "1"),
        ],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=Path(__file__).parent.parent,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "1 parity cases, 0 beyond their tolerance" in run.stdout
    text = (tmp_path / "found.md").read_text()
    assert "| few steps | classifier | float64 | cpu |" in text
    assert "<h2>Lanczos</h2>" in (tmp_path / "found.html").read_text()


def test_pages_say_what_the_record_of_a_gpu_holds():
    root = Path(__file__).parents[1]
    record, overlap = (json.loads(x.read_text()) for x in (gpu_record.PARITY, gpu_record.OVERLAP))
    ran, passed = gpu_record.counted(record)
    on_gpu = [case for case in record["cases"] if case["error"] != gpu_record.NOT_RUN]
    assert all(case["device"] == "gpu" and "cpu_error" in case for case in record["cases"])
    assert all(case["passed"] == (case["error"] <= case["tolerance"]) for case in on_gpu)
    page = (root / "docs" / "repository.md").read_text()
    assert f"[{passed:,} of {ran:,} cases]" in page
    readme, said = (root / "README.md").read_text(), gpu_record.limit(record, overlap)
    assert gpu_record.with_limit(readme, said) == readme, (
        "python -m parity_tests.gpu_record --write"
    )
    assert f"{passed:,} of {ran:,} [parity cases]" in said.replace("\n ", "")


def test_without_a_record_nothing_is_said_to_have_run_on_a_gpu():
    said = gpu_record.limit(None, None)
    assert said.startswith("- Nothing has run on a GPU or a TPU.") and "agree" not in said


def test_a_case_has_both_errors_or_says_that_it_did_not_run(tmp_path):
    def case(name, device, dtype="float32", error=1e-6):
        row = {"part": "EKFAC", "name": name, "problem": "wide", "dtype": dtype, "device": device}
        return row | {"error": error, "tolerance": 1e-5, "where": "a", "passed": error <= 1e-5}

    circumstances = {"date": "today", "device": "a card"}
    cases = [case("both", "gpu"), case("both", "gpu", "tf32", 1e-3), case("here alone", "gpu")]
    gpu = circumstances | {"cases": [*cases, case("both", "cpu", error=5.0)]}
    cpu = {"date": "before", "jax": "0", "cases": [case("both", "cpu", error=2e-6)]}
    cpu["cases"].append(case("on a CPU alone", "cpu", error=3e-6))
    found = gpu_record.joined(gpu, cpu)
    both, tf32, alone, other = found["cases"]
    assert (both["error"], both["cpu_error"]) == (1e-6, 2e-6)
    assert (tf32["error"], tf32["cpu_error"]) == (1e-3, 2e-6)
    assert (alone["error"], alone["cpu_error"]) == (1e-6, gpu_record.NOT_RUN)
    assert (other["error"], other["cpu_error"]) == (gpu_record.NOT_RUN, 3e-6)
    assert found["cpu"] == {"date": "before", "jax": "0"} and found["date"] == "today"
    assert gpu_record.counted(found) == (3, 2)
    assert json.loads(gpu_record.text(found)) == found
    assert gpu_record.joined(gpu, None)["cpu"] == gpu_record.NOT_RUN


def test_a_report_without_a_gpu_leaves_record_and_readme_as_they_were(
    tmp_path, monkeypatch, capsys
):
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"cases": []}))
    monkeypatch.setattr(sys, "argv", ["gpu_record", "--join", str(report), str(report), "--write"])
    monkeypatch.setattr(gpu_record, "PARITY", tmp_path / "parity-gpu.json")
    monkeypatch.setattr(gpu_record, "README", tmp_path / "README.md")
    assert gpu_record.main() == 1 and "no case of a GPU" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
