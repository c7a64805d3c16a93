"""A plan as text."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jaxkfac.memory import bytes_text
from jaxkfac.planning._levers import TITLES
from jaxkfac.planning._rows import ESTIMATED
from jaxkfac.planning._search import Need

if TYPE_CHECKING:
    from jaxkfac.planning._plan import MemoryPlan

WIDTH = 120


def plan_text(plan: "MemoryPlan") -> str:
    """The table that ``print(plan)`` shows."""
    needs = {"now": plan.now, **{TITLES[x]: need for x, need in plan.alone.items()}}
    if plan.smallest is not None and plan.smallest.levers not in ((), *((x,) for x in plan.alone)):
        needs["chosen"] = plan.smallest
    columns = list(needs.values())
    lines = [
        ["on the device", *needs],
        *_rows([need.device for need in columns], mark=ESTIMATED),
        ["total", *(bytes_text(need.device_total) for need in columns)],
        [
            f"fits {bytes_text(plan.device_bytes)}",
            *("yes" if plan.fits(need) else "no" for need in columns),
        ],
    ]
    if any(need.host for need in columns):
        lines += [
            ["on the host"],
            *_rows([need.host for need in columns], mark=("workspace",)),
            ["total", *(bytes_text(need.host_total) for need in columns)],
        ]
    return "\n".join([*_aligned(lines), "", *_remarks(plan), *_verdict(plan)])


def _rows(tables: Sequence[Mapping[str, int]], mark: Sequence[str]) -> list[list[str]]:
    names = dict.fromkeys(name for table in tables for name in table)
    return [
        [
            f"  {name}" + " ~" * (name in mark),
            *(bytes_text(table[name]) if table.get(name) else "–" for table in tables),
        ]
        for name in names
    ]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    full = max(map(len, rows))
    cells = [[*row, *[""] * (full - len(row))] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(full)]
    return [
        "  ".join(
            x.rjust(w) if i else x.ljust(w) for i, (x, w) in enumerate(zip(row, widths))
        ).rstrip()
        for row in cells
    ]


def _remarks(plan: "MemoryPlan") -> list[str]:
    lines = [f"{TITLES[x]}: {need.costs[x]}" for x, need in plan.alone.items()]
    lines += [f"{TITLES[x]}: not available: {why}" for x, why in plan.unavailable.items()]
    lines.append(
        "~: an estimate: activations are the temporaries of the program as compiled for "
        f"{plan.compiled_for}, workspace is what syevd takes"
    )
    return [line for text in lines for line in _wrapped(text)]


def _verdict(plan: "MemoryPlan") -> list[str]:
    if plan.smallest is None:
        return _wrapped(plan.why_not())
    if not plan.smallest.levers:
        return ["it fits as it is"]
    names = " + ".join(TITLES[x] for x in plan.smallest.levers)
    lines = [f"the smallest set that fits: {names}"]
    lines += [f"  {TITLES[x]}: {cost}" for x, cost in plan.smallest.costs.items()]
    return [line for text in lines for line in _wrapped(text)]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="    ", replace_whitespace=False)


def need_words(need: Need) -> str:
    """The levers of a need, in words."""
    return " + ".join(TITLES[lever] for lever in need.levers) or "no lever"
