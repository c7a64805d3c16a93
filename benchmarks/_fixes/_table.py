"""What was measured, as rows; and whether it supports what the documents claim."""

from typing import Any

from benchmarks._fixes._cases import Case

COLUMNS = ("fault", "the documents claim", "PyTorch", "JAX", "supported?", "JAX counterpart")
MIB = 2**20


def verdict(case: Case, torch: dict[str, Any], device: str) -> str:
    """Whether the fix changes what the claim is about, by at least a tenth."""
    if device == "cpu" and case.only_gpu:
        return f"only a GPU can show it: {case.only_gpu}"
    quantity = {"peak": "peak_bytes", "time": "seconds"}.get(case.about, case.about)
    before, after = torch["before"][quantity], torch["after"][quantity]
    if before is None or after is None:
        return "not measured: nothing here counts it"
    saved, least = before - after, {"peak": 2 * MIB, "time": 0, "synchronisations": 1}[case.about]
    enough = saved >= max(before / 10, least)
    if enough and case.about == "time":
        fastest_before, slowest_after = (
            torch["before"]["seconds_range"][0],
            torch["after"]["seconds_range"][1],
        )
        if slowest_after >= fastest_before:
            return f"unclear: {_change(before, after)} time, and the runs overlap"
    return f"{'yes' if enough else 'no'}: {_change(before, after)} {case.about}"


def _change(before: float, after: float) -> str:
    if before == 0:
        return "nothing to save in"
    return f"{abs(after / before - 1):.0%} {'less' if after <= before else 'more'}"


def as_rows(record: dict[str, Any]) -> list[tuple[str, ...]]:
    """One row a case, in the order of ``COLUMNS``."""
    return [
        (
            found["name"],
            found["claim"],
            _pair(found["torch"]),
            _pair(found["jax"]),
            found["verdict"],
            found["jax_counterpart"],
        )
        for found in record["cases"]
    ]


def as_markdown(record: dict[str, Any]) -> str:
    """The table, and under which circumstances it was made."""
    circumstances = ", ".join(
        f"{name} {record[name]}" for name in ("python", "torch", "jax", "safetensors")
    )
    where = f"{record['device']}, {record['cores']} cores ({record['machine']})"
    what = "resident memory" if record["device"] == "cpu" else "bytes allocated on the GPU"
    rows = [COLUMNS, ("---",) * len(COLUMNS), *as_rows(record)]
    return "\n".join(
        [
            "# The documented fixes, measured",
            "",
            f"{record['date']}, {where}; {circumstances}; load before {record['load_before']:.1f}.",
            f"Made by `{record['command']}`.",
            "",
            f"Before → after: peak {what} beyond what was there, and wall time; each number from",
            f"a process of its own, the median of {record['runs']} runs. See the docstring of",
            "`benchmarks/fixes.py` for the rule behind “supported?”.",
            "",
            *("| " + " | ".join(row) + " |" for row in rows),
            "",
        ]
    )


def _pair(variants: dict[str, Any]) -> str:
    before, after = variants["before"], variants["after"]
    if before is None:
        return "–"
    peaks = " → ".join(_mib(side["peak_bytes"]) for side in (before, after))
    times = " → ".join(f"{side['seconds']:.3g}" for side in (before, after))
    return f"{peaks} MiB, {times} s"


def _mib(nbytes: int | None) -> str:
    if nbytes is None:
        return "?"
    return f"{nbytes / MIB:.{0 if nbytes >= 10 * MIB else 1}f}"
