"""The analysis of a pretrained model for the terminal."""

from collections.abc import Mapping, Sequence

from rich.table import Table

from jaxkfac._text import number
from jaxkfac.memory import bytes_text
from jaxkfac.report._analysis import MemoryRow, stage_sums
from jaxkfac.report._capacity import CapacityReport
from jaxkfac.report._depth import stacks_of
from jaxkfac.report._families import families
from jaxkfac.report._spectra import SpectrumRecord
from jaxkfac.report._terminal import terminal_table

_FEW = 48  # blocks that a terminal shows one by one


def memory_plan_rows(
    plan: Sequence[MemoryRow], *, disk: int, peaks: Mapping[str, int] | None = None
) -> list[list[str]]:
    """``[stage, what, bytes, peak]``: each row of a plan, and the sums with what was measured."""
    rows = []
    for on_device in (True, False):
        own = [row for row in plan if row.on_device == on_device]
        where = "" if all(row.on_device for row in plan) or on_device else ", main memory"
        rows += [[row.stage, row.what + where, bytes_text(row.nbytes), ""] for row in own]
        for stage, nbytes in stage_sums(own, on_device=on_device).items():
            peak = (peaks or {}).get(stage)
            is_resident = not on_device or all(row.on_device for row in plan)
            measured = bytes_text(peak) if peak is not None and is_resident else ""
            rows.append([f"{stage}, sum{where}", "", bytes_text(nbytes), measured])
    rows.append(["disk", "folded factors, sums of a pass, vectors", bytes_text(disk), ""])
    return rows


def memory_plan_table(
    model: str, plan: Sequence[MemoryRow], *, disk: int, peaks: Mapping[str, int] | None = None
) -> Table:
    """A plan of memory; with ``peaks`` what was measured stands beside it."""
    head, rows = ["stage", "", "plan", "peak"], memory_plan_rows(plan, disk=disk, peaks=peaks)
    if peaks is None:
        head, rows = head[:3], [row[:3] for row in rows]
    return terminal_table(f"Memory of the analysis of {model}", head, rows, words=(0, 1))


def spectra_summary_rows(records: Sequence[SpectrumRecord]) -> list[list[str]]:
    """A line for each factor, all its blocks together: smallest, and largest where they differ."""
    rows = []
    for family in families(records, shared_once=True):
        members = family.members
        rows.append(
            [
                family.title,
                family.side,
                str(len(members)),
                _range([float(len(x.raw)) for x in members]),
                _range([x.top for x in members]),
                _range([x.condition_raw for x in members]),
                _range([x.condition_clipped for x in members]),
                str(sum(x.raised for x in members)),
                _range([x.entropy_rank for x in members]),
            ]
        )
    return rows


SUMMARY_HEAD = [
    *("layer", "factor", "blocks", "size", "top", "condition", "clipped", "raised"),
    "entropy rank",
]


def spectra_summary_table(records: Sequence[SpectrumRecord]) -> Table:
    """One line for each factor, all its blocks together."""
    return terminal_table("Spectra", SUMMARY_HEAD, spectra_summary_rows(records), words=(0, 1))


def depth_table(report: CapacityReport) -> Table | None:
    """One line for each block of the stacks; ``None`` where there is no stack, or a long one."""
    stacks = stacks_of(report)
    if not stacks or sum(stack.depth for stack in stacks) > _FEW:
        return None
    table = None
    for stack in stacks:
        title = f"{stack.name}: entropy rank of each layer, and trace"
        part = terminal_table(title, stack.head(), list(stack.rows()))
        if table is None:
            table = Table.grid()
        table.add_row(part)
    return table


def _range(values: Sequence[float | None]) -> str:
    """The smallest and the largest; an infinite one is the largest."""
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    ends = [number(min(known)), "–" if len(known) < len(values) else number(max(known))]
    return ends[0] if ends[0] == ends[1] else " … ".join(ends)
