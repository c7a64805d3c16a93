"""The record as a page of tables."""

from collections.abc import Mapping
from typing import Any

MIB = 2**20
_COLUMNS = (
    "step",
    "temporaries",
    "of the gradient's",
    "arguments",
    "outputs",
    "aliased",
    "library scratch, by formula",
    "CPU s to compile",
    "of the gradient's",
    "solves",
    "collectives",
    "compiled",
)


def page(record: Mapping[str, Any]) -> str:
    """Markdown: one table for each target, layout, size and dtype."""
    parts = [
        "# Compiled without a device\n",
        f"`{record['command']}` writes this page and `accelerators.json`.\n",
        "Bytes are MiB on one device. What a row says and what it cannot say: "
        "`docs/accelerators.md`.\n",
    ]
    groups: dict[str, dict[str, Any]] = {}
    for place, row in record["rows"].items():
        group, _, name = place.rpartition("/")
        groups.setdefault(group, {})[name] = row
    for group, rows in groups.items():
        target, layout, size, dtype = group.split("/")
        first = sorted(rows, key=lambda name: (name != "gradient", name))
        options = f"--target {target} --layout '{layout}' --size {size} --dtype {dtype}"
        parts += [
            f"## {target}, {layout}, {size}, {dtype}\n",
            f"`python -m benchmarks.accelerators {options}`\n\n{_versions(rows)}.\n",
            f"| {' | '.join(_COLUMNS)} |\n{'|---' * len(_COLUMNS)}|",
            "\n".join(_line(name, rows) for name in first) + "\n",
        ]
    return "\n".join(parts)


def _versions(rows: Mapping[str, Any]) -> str:
    """Of the compilers of a table's rows; more than one set where some are older."""
    every = {", ".join(map(" ".join, row["versions"].items())): None for row in rows.values()}
    return "; ".join(every)


def _line(name: str, rows: Mapping[str, Any]) -> str:
    row = rows[name]
    when = f"{row['date']} {row['commit']}"
    if "stopped" in row:
        return f"| {name} | {row['stopped']} |{' |' * (len(_COLUMNS) - 3)} {when} |"
    gradient = gradient_of(name, rows)
    sizes = (row[key] / MIB for key in ("temporaries", "arguments", "outputs", "scratch"))
    temporaries, *others = (f"{size:.1f}" for size in sizes)
    # Rows of before the record had it are those whose arguments are not donated.
    others.insert(2, f"{row.get('aliased', 0) / MIB:.1f}")
    collectives = [
        f"{kind} {of['count']} ({of['bytes'] / MIB:.1f})" for kind, of in row["collectives"].items()
    ]
    cells = (
        name,
        temporaries,
        _ratio(row, gradient, "temporaries"),
        *others,
        f"{row['compile_cpu_s']:.1f}",
        _ratio(row, gradient, "compile_cpu_s"),
        ", ".join(row["solves"]) or "–",
        ", ".join(collectives) or "–",
        when,
    )
    return f"| {' | '.join(cells)} |"


def gradient_of(name: str, rows: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a step's own program where the table has it, else the table's."""
    program, _, _ = name.partition(", ")
    return rows.get(f"{program}, gradient") or rows.get("gradient") or {}


def _ratio(row: Mapping[str, Any], gradient: Mapping[str, Any], key: str) -> str:
    return f"{row[key] / gradient[key]:.3f}" if gradient.get(key) else "–"
