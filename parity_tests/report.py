"""A pytest plug-in that writes parity_report.md, .html and .json: ``-p parity_tests.report``.

Workers of pytest-xdist send what a test has found with its report, so that one process writes.
"""

import datetime
import html
import json
import platform
import re
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

TITLE = "Parity of jaxkfac with torch_ref"
THRESHOLDS = Path(__file__).parents[1] / "benchmarks" / "results" / "thresholds.md"
COLUMNS = (
    "case", "problem", "dtype", "device", "worst error", "tolerance", "digits in common",
    "furthest apart", "reason for the tolerance", "",
)  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--parity-report",
        default="parity_report",
        metavar="PATH",
        help="where to write the report, without .md, .html and .json",
    )


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # a worker of pytest-xdist reports to the controller
        config.pluginmanager.register(_Report(Path(str(config.getoption("--parity-report")))))


class _Report:
    """Collects records as reports come in, and writes them when the session ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._records: list[dict[str, Any]] = []
        self._skipped: dict[str, int] = {}
        self._broken: list[str] = []  # by an error or a shape: no line of a table

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and "parity_tests" in report.nodeid:
            reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else "skipped"
            self._skipped[reason] = self._skipped.get(reason, 0) + 1
        compared = any(name == "parity" for name, _ in report.user_properties)
        if report.when != "call" or not compared:
            self._note_failure(report)
        if report.when == "call":
            self._records += [
                value | {"passed": report.passed}
                for name, value in report.user_properties
                if name == "parity"
            ]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note_failure(report)  # a file without its cases

    def _note_failure(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed and "parity_tests" in report.nodeid and report.nodeid not in self._broken:
            self._broken.append(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        records = sorted(self._records, key=_place)
        summary = _summary(records, self._skipped, self._broken)
        for suffix, write in ((".md", markdown), (".html", page), (".json", record_of)):
            self._path.with_suffix(suffix).write_text(write(records, summary))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        failed = sum(not record["passed"] for record in self._records)
        terminalreporter.write_line(
            f"{len(self._records)} parity cases, {failed} beyond their tolerance, "
            f"{len(self._broken)} tests FAILED otherwise: "
            f"{self._path.with_suffix('.md')}, {self._path.with_suffix('.html')}"
        )


def _place(record: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(record[key] for key in ("device", "part", "name", "problem", "dtype"))


def _summary(
    records: Sequence[dict[str, Any]], skipped: dict[str, int], broken: Sequence[str] = ()
) -> list[str]:
    failed = sum(not record["passed"] for record in records)
    lines = [f"{len(records)} cases compared, {failed} beyond their tolerance."]
    lines += [f"FAILED, and not by a tolerance: {nodeid}." for nodeid in broken]
    for dtype in ("float64", "float32", "tf32", "bfloat16"):
        digits = sorted(r["digits"] for r in records if r["dtype"] == dtype)
        if digits:
            lines.append(
                f"{dtype}: {len(digits)} cases, digits in common from {digits[0]:.1f} to "
                f"{digits[-1]:.1f}, median {digits[len(digits) // 2]:.1f}."
            )
    lines += [f"{count} tests skipped: {reason}." for reason, count in skipped.items()]
    return lines


def _tables(
    records: Iterable[dict[str, Any]],
) -> dict[str, list[tuple[str, ...]]]:
    """``{part: rows}``, in the order of the records."""
    tables: dict[str, list[tuple[str, ...]]] = {}
    for record in records:
        row = (
            record["name"],
            record["problem"],
            record["dtype"],
            record["device"],
            f"{record['error']:.1e}",
            f"{record['tolerance']:.1e}",
            f"{record['digits']:.1f}",
            record["where"],
            record["reason"],
            "" if record["passed"] else "FAILED",
        )
        tables.setdefault(record["part"], []).append(row)
    return tables


def markdown(records: Sequence[dict[str, Any]], summary: Sequence[str]) -> str:
    """The report as Markdown."""
    lines = [f"# {TITLE}", "", *(f"- {line}" for line in summary)]
    for part, rows in _tables(records).items():
        lines += ["", f"## {part}", "", _row(COLUMNS), _row(["---"] * len(COLUMNS))]
        lines += [_row(row) for row in rows]
    # Which case goes down which side of a branch: the record of another command, one level down.
    lines += ["", re.sub("^#", "##", THRESHOLDS.read_text(), flags=re.MULTILINE).rstrip()]
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def record_of(records: Sequence[dict[str, Any]], summary: Sequence[str]) -> str:
    """The report as JSON, a line for each case, with date, versions and devices."""
    import jax
    import torch

    head = {
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python -m pytest", *sys.argv[1:]]),
        "python": platform.python_version(),
        **{name: version(name) for name in ("jax", "flax", "optax", "torch", "numpy")},
        "device": jax.devices()[0].device_kind,
        "torch device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "summary": list(summary),
    }
    lines = [json.dumps(_line(record)) for record in records]
    whole = json.dumps(head, indent=1)
    return f'{whole[:-2]},\n "cases": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n"


def _line(record: dict[str, Any]) -> dict[str, Any]:
    keys = ("part", "name", "problem", "dtype", "device", "error", "tolerance", "where", "passed")
    return {key: record[key] for key in keys} | {"error": float(f"{record['error']:.3g}")}


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 80rem; padding: 0 1rem;
       color: #1c2330; background: #fff; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid #dde2ea; }
th { position: sticky; top: 0; background: #f4f6f9; }
tr.failed td { background: #fbe3e1; }
@media (prefers-color-scheme: dark) {
  body { color: #e3e7ee; background: #14181f; }
  th, td { border-color: #323a47; }
  th { background: #1d232d; }
  tr.failed td { background: #5a2320; }
}
"""


def page(records: Sequence[dict[str, Any]], summary: Sequence[str]) -> str:
    """The report as one page without anything from outside."""
    parts = [
        "<!doctype html>",
        f'<html lang="en"><meta charset="utf-8"><title>{TITLE}</title>',
        '<meta name="viewport" content="width=device-width">',
        f"<style>{STYLE}</style>",
        f"<h1>{TITLE}</h1>",
        "<ul>",
        *(f"<li>{html.escape(line)}</li>" for line in summary),
        "</ul>",
    ]
    for part, rows in _tables(records).items():
        parts += [f"<h2>{html.escape(part)}</h2>", "<table>", _cells(COLUMNS, "th")]
        parts += [_cells(row, "td") for row in rows]
        parts.append("</table>")
    return "\n".join(parts) + "\n</html>\n"


def _cells(cells: Sequence[str], tag: str) -> str:
    row = "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)
    return f'<tr class="failed">{row}</tr>' if cells[-1] == "FAILED" else f"<tr>{row}</tr>"
