"""The record as a page of tables."""

from typing import Any

MIB = 2**20
_HEAD = (
    "| step | temporaries | of the gradient's | arguments | outputs | library scratch, at least "
    "| CPU s to compile | solves | collectives |\n|---|---|---|---|---|---|---|---|---|\n"
)


def page(record: dict[str, Any]) -> str:
    """Markdown: one table for each target, layout, size and dtype."""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    parts = [
        "# Compiled without a device\n",
        f"`{record['command']}` writes this page and `accelerators.json`. {versions}.\n",
        "Bytes are MiB on one device. What a row says and what it cannot say: "
        "`docs/accelerators.md`.\n",
    ]
    groups: dict[str, dict[str, Any]] = {}
    for place, row in record["rows"].items():
        group, _, name = place.rpartition("/")
        groups.setdefault(group, {})[name] = row
    for group, rows in groups.items():
        gradient = rows.get("gradient", {}).get("temporaries")
        first = sorted(rows, key=lambda name: (name != "gradient", name))
        lines = [_line(name, rows[name], gradient) for name in first]
        parts.append(f"## {', '.join(group.split('/'))}\n\n{_HEAD}" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def _line(name: str, row: dict[str, Any], gradient: int | None) -> str:
    if "stopped" in row:
        return f"| {name} | {row['stopped']} | | | | | | | |"
    ratio = f"{row['temporaries'] / gradient:.3f}" if gradient else "–"
    solves = ", ".join(row["solves"]) or "–"
    collectives = ", ".join(f"{n} {c}" for n, c in row["collectives"].items()) or "–"
    sizes = (row[key] / MIB for key in ("temporaries", "arguments", "outputs", "scratch"))
    temporaries, *others = (f"{size:.1f}" for size in sizes)
    cells = (name, temporaries, ratio, *others, f"{row['compile_cpu_s']:.1f}", solves, collectives)
    return f"| {' | '.join(cells)} |"
