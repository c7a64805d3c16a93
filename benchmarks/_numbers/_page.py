"""The page: what was not reached first, then a section for each record."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks._numbers._row import Row, Section
from benchmarks._numbers._sections import SECTIONS
from benchmarks._numbers._words import ACCURACY, HEAD, MISSED, OTHERS, UNMEASURED

RESULTS = Path(__file__).parents[1] / "results"


def page(results: Path = RESULTS, sections: Sequence[Section] = SECTIONS) -> str:
    """``docs/numbers.md``, from the records of a folder."""
    made = [(section, _record(results, section)) for section in sections]
    rows = [(section, list(section.rows(record))) for section, record in made]
    parts = [HEAD, MISSED, *_missed(rows), "", UNMEASURED, *ACCURACY, ""]
    for (section, record), (_, lines) in zip(made, rows):
        parts += [f"## {section.title}", "", section.about, "", _origin(section, record), ""]
        parts += [*_table(section, lines), ""]
    parts += [OTHERS, *_others(results, {section.record for section in sections}), ""]
    return "\n".join(parts)


def _record(results: Path, section: Section) -> Any:
    return json.loads((results / f"{section.record}.json").read_text())


def _others(results: Path, shown: set[str]) -> Iterator[str]:
    for path in sorted(results.glob("*.json")):
        if path.stem not in shown:
            record = json.loads(path.read_text())
            command = f"`{record['command']}`" if "command" in record else ""
            link = f"[`{path.name}`](../benchmarks/results/{path.name})"
            yield f"| {link} | {command} | {record.get('date', '')} |"


def _missed(rows: Sequence[tuple[Section, Sequence[Row]]]) -> Iterator[str]:
    yield "| section | what | measured | goal |"
    yield "|---|---|---|---|"
    goals = [(section, row) for section, lines in rows for row in lines if row.goal]
    missed = [(section, row) for section, row in goals if not row.goal.is_met]
    for section, row in missed:
        value = f"{row.goal.value:.3g}{row.goal.unit}"
        yield f"| {section.title} | {row.what} | {value} | {row.goal} |"
    yield ""
    reached = len(goals) - len(missed)
    yield f"{reached} of {len(goals)} goals were reached; the tables below have all."


def _origin(section: Section, record: Any) -> str:
    """Command, date, versions, device: what the record says of them."""
    command = record.get("command") or section.command
    file = f"{section.record}.json"
    said = [f"[`{file}`](../benchmarks/results/{file})", f"`{command}`"]
    stamps = [record, *record.get("rows", {}).values()] if "rows" in record else [record]
    dates = sorted({stamp["date"] for stamp in stamps if "date" in stamp})
    said += [" to ".join(dict.fromkeys((dates[0], dates[-1])))] if dates else []
    if "commit" in record:
        said.append(f"commit {record['commit'][:7]}")
    versions = record if "jax" in record else stamps[-1].get("versions", {})
    names = ("jax", "flax", "torch", "peft", "qwix", "scipy", "jaxlib", "nvidia-cuda-nvcc-cu12")
    said += [f"{name} {versions[name]}" for name in names if name in versions]
    if "device" in record:
        cores = f", {record['cores']} cores" if "cores" in record else ""
        said.append(f"{record['device']} ({record['machine']}{cores})")
    return " · ".join(said)


def _table(section: Section, rows: Sequence[Row]) -> Iterator[str]:
    has_goals = any(row.goal for row in rows)
    heads = ["what", "jaxkfac" if section.beside else "measured"]
    heads += [section.beside] * bool(section.beside)
    heads += ["goal", "reached"] * has_goals
    yield "| " + " | ".join(heads) + " |"
    yield "|---" * len(heads) + "|"
    for row in rows:
        cells = [row.what, row.here, *([row.beside] if section.beside else [])]
        if has_goals:
            met = "" if not row.goal else "yes" if row.goal.is_met else "**no**"
            cells += [str(row.goal) if row.goal else "", met]
        yield "| " + " | ".join(cells) + " |"
