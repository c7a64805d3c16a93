"""The record: rows that are measured, and rows that follow by counting.

Every verdict is judged anew from its numbers, and every number that follows by counting is counted
anew, each time that the record is made or compared.
"""

import datetime
import math
import os
import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Any

from benchmarks._documents._budgets import BUDGETS, Columns, by_length, compared
from benchmarks._documents._claim import Claim, Context, Measured, Row, judge
from benchmarks._documents._sources import Sources, digest, packed, unpacked
from benchmarks._documents.claims import CLAIMS


def unmeasured(record: Mapping[str, Any]) -> list[str]:
    """Claims that are measured and have no row."""
    recorded = {row["name"] for row in record["claims"]}
    return [claim.name for claim in CLAIMS if claim.measured and claim.name not in recorded]


def recounted(record: Mapping[str, Any], lengths: Mapping[int, Columns]) -> dict[str, Any]:
    """A record with all that follows by counting worked out anew; measurements stay.

    A claim that is not measured yet has no row, and neither has one that needs its verdict.
    """
    recorded = {row["name"]: row for row in record["claims"]}
    missing = set(unmeasured(record))
    claims = [claim for claim in CLAIMS if not missing & {claim.name, *claim.needs}]
    context = Context(record["device"], {}, lengths)
    rows: dict[str, Row] = {}
    for claim in claims:
        context = context._replace(rows=dict(rows))
        sides = {side: _side(claim, side, recorded, context) for side in ("torch", "jax")}
        rows[claim.name] = judge(claim, **sides, context=context)
    plain = []
    for claim in claims:
        row = rows[claim.name].to_dict()
        if claim.measured:
            row["measured"] = recorded[claim.name]["measured"]
        plain.append(row)
    return {
        **record,
        "claims": plain,
        "lengths": {str(tokens): columns for tokens, columns in lengths.items()},
        "budgets": [compared(budget) for budget in BUDGETS],
    }


def _side(
    claim: Claim, side: Any, recorded: Mapping[str, Any], context: Context
) -> Measured | None:
    if claim.counted(side):
        return claim.measure(side, context)
    if side == "torch" and claim.waits(context):
        return None
    known = recorded.get(claim.name, {}).get(side)
    return Measured(**known) if isinstance(known, Mapping) else None


def recorded_lengths(record: Mapping[str, Any]) -> dict[int, Columns]:
    """Plans of the record, by length."""
    return {int(tokens): columns for tokens, columns in record["lengths"].items()}


def measured(
    record: Mapping[str, Any], names: Iterable[str], device: str, *, trace: bool = True
) -> dict[str, Any]:
    """A record in which the claims of these names are measured anew, and all counted ones."""
    import jax

    rows = {row["name"]: row for row in record.get("claims", ())}
    sources = unpacked(record["sources"]) if "sources" in record else {}
    stamp, wanted = _stamp(), set(names)
    for claim in CLAIMS:
        if claim.name not in wanted or not claim.measured:
            continue
        jax.clear_caches()  # what is cached is not traced, and would not be entered
        row: dict[str, Any] = {"name": claim.name, "measured": stamp}
        found: list[Sources] = []
        for side in ("torch", "jax"):
            value, entered = claim.measure_traced(side, Context(device), trace=trace)
            row[side] = value and value._asdict()
            found += [entered] if entered else []
        rows[claim.name] = row
        sources.pop(claim.name, None)
        if found:
            functions = tuple(sorted({name for entered in found for name in entered.functions}))
            sources[claim.name] = Sources(functions, digest(functions))
        print(f"{claim.name}: {row['torch']}, {row['jax']}", flush=True)
    names_now = {claim.name for claim in CLAIMS if claim.measured}
    whole = {
        **circumstances(),
        "device": device,
        **{key: record[key] for key in ("lessons",) if key in record},
        "claims": list(rows.values()),
        "sources": packed({name: x for name, x in sources.items() if name in names_now}),
    }
    return recounted(whole, recorded_lengths(record) if "lengths" in record else by_length())


def circumstances() -> dict[str, Any]:
    """When and where."""
    return {
        "date": datetime.date.today().isoformat(),
        "command": "python -m benchmarks.documents --write",
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "jax", "jaxkfac", "safetensors")},
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def _stamp() -> str:
    today = datetime.date.today().isoformat()
    return f"{today}, torch {version('torch')}, jax {version('jax')}, load {os.getloadavg()[0]:.1f}"


def differences(record: Mapping[str, Any], made: Mapping[str, Any]) -> list[str]:
    """Where two records differ in more than the last digits of a number: a line for each row."""
    pairs = [("claims", "name"), ("budgets", "title")]
    lines = []
    for part, name in pairs:
        before, after = ({row[name]: row for row in x[part]} for x in (record, made))
        lines += [f"{row}: not in both" for row in sorted(before.keys() ^ after.keys())]
        for row in (row for row in before if row in after):
            for field in sorted({*before[row], *after[row]}):
                old, new = before[row].get(field), after[row].get(field)
                if not _equal(old, new):
                    lines.append(f"{row}, {field}: {old!r} in the record, {new!r} now")
    for tokens in sorted({*record["lengths"], *made["lengths"]}, key=int):
        old, new = (x["lengths"].get(tokens) for x in (record, made))
        if not _equal(old, new):
            lines.append(f"FLAN-T5-XL planned for {tokens} tokens: {old} in the record, {new} now")
    return lines


def _equal(old: Any, new: Any) -> bool:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return old.keys() == new.keys() and all(_equal(old[key], new[key]) for key in old)
    if isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)):
        return len(old) == len(new) and all(map(_equal, old, new))
    if isinstance(old, (int, float)) and isinstance(new, (int, float)):
        return math.isclose(old, new, rel_tol=1e-6, abs_tol=1e-12)
    return old == new
