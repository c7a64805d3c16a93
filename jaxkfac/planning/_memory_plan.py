"""A memory plan: bytes by row, as the training stands and with each option, as a table."""

import dataclasses
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxkfac._text import WIDTH, aligned, table_html
from jaxkfac.memory import MemoryBudgetError, bytes_text
from jaxkfac.planning._options import OPTIONS
from jaxkfac.planning._program_bytes import ESTIMATED
from jaxkfac.planning._search import MemoryEstimate


@dataclasses.dataclass(frozen=True, eq=False)
class MemoryPlan:
    """Bytes by row, for the training as it stands and with each option; ``print`` shows a table.

    Attributes:
        now: Estimate for the training as it stands.
        alone: ``{option: estimate}`` with a single option; ``"nf4"`` with the adapters it needs,
            ``"accumulator"`` with accumulation.
        unavailable: ``{option: reason}``.
        smallest: Estimate for the smallest set of options that fits; ``None`` if none does.
        best: Estimate for the set with the fewest bytes on the device among those tried.
        device_bytes: Bytes on the device, including headroom.
        host_bytes: Bytes in main memory; ``None`` means no limit.
        headroom: Fraction of ``device_bytes`` to keep free.
        max_gradients: Largest cost of a step, in gradients; ``None`` means no limit.
        compiled_for: Description of the device that the programs are for.
        not_traced: Why temporaries of the update are not counted; ``""`` if they are.
        not_compiled: Why a compiler could not be used as requested; ``""`` otherwise.
        within: Largest relative error of an estimated total.
        devices: Number of devices that train together.
        fully_sharded: Whether parameters are sharded over them.
    """

    now: MemoryEstimate
    alone: Mapping[str, MemoryEstimate]
    unavailable: Mapping[str, str]
    smallest: MemoryEstimate | None
    best: MemoryEstimate
    device_bytes: int
    host_bytes: int | None
    headroom: float
    max_gradients: float | None
    compiled_for: str
    not_traced: str = ""
    not_compiled: str = ""
    within: float = 0.0
    devices: int = 1
    fully_sharded: bool = False

    @property
    def accumulation_steps(self) -> int:
        """The number of micro-batches per step in the smallest set that fits.

        Raises:
            MemoryBudgetError: nothing fits.
        """
        return self.chosen().steps

    def fits(self, estimate: MemoryEstimate | None = None) -> bool:
        """Whether an estimate fits the device with headroom, the host, and the cost of a step;
        by default that of the training as it stands.
        """
        estimate = self.now if estimate is None else estimate
        return estimate.fits(self.usable_bytes, self.host_bytes, self.max_gradients)

    @property
    def usable_bytes(self) -> float:
        """``device_bytes`` without the headroom."""
        return (1 - self.headroom) * self.device_bytes

    def chosen(self) -> MemoryEstimate:
        """The estimate for the smallest set of options that fits.

        Raises:
            MemoryBudgetError: nothing fits; names the closest set and its largest row.
        """
        if self.smallest is None:
            raise MemoryBudgetError(self.why_not())
        return self.smallest

    def why_not(self) -> str:
        """Explain which set is closest, and what it lacks."""
        best, short, row = self.best, [], self.best.largest
        if best.device_total > self.usable_bytes:
            missing = bytes_text(best.device_total - self.usable_bytes)
            short.append(
                f"needs {bytes_text(best.device_total)} on the device, {missing} more than may be "
                "used"
            )
        if self.host_bytes is not None and best.host_total > self.host_bytes:
            missing = bytes_text(best.host_total - self.host_bytes)
            short.append(
                f"needs {bytes_text(best.host_total)} on the host, {missing} more than it has"
            )
        if self.max_gradients is not None and best.gradients > self.max_gradients:
            short.append(
                f"takes the time of {best.gradients:.3g} gradients a step, "
                f"{best.gradients - self.max_gradients:.3g} more than allowed"
            )
        return (
            f"nothing fits {_room(self)}: with the closest options, {_options_text(best)}, it "
            f"still {' and '.join(short)}; the largest row is {row!r} with "
            f"{bytes_text(best.device[row])}: use a larger device, shard it, or shrink the model "
            "or the batch"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        exchange_is_known = not self.fully_sharded  # the exchanged bytes, without a compiler
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del fields["not_traced"], fields["not_compiled"]
        return fields | {
            "now": _plain(self.now, exchange_is_known),
            "alone": {
                option: _plain(estimate, exchange_is_known)
                for option, estimate in self.alone.items()
            },
            "unavailable": dict(self.unavailable),
            "smallest": None if self.smallest is None else _plain(self.smallest, exchange_is_known),
            "best": _plain(self.best, exchange_is_known),
        }

    def __repr__(self) -> str:
        verdict = (
            "nothing fits" if self.smallest is None else f"{_options_text(self.smallest)} fits"
        )
        need = bytes_text(self.now.device_total)
        return f"MemoryPlan: needs {need}, has {_room(self)}; {verdict}"

    def __str__(self) -> str:
        return _text(self)

    def _repr_html_(self) -> str:
        head, *rows = _table(self, _columns(self), bytes_text)
        filled = [[*row, *[""] * (len(head) - len(row))] for row in rows]
        return table_html("Memory plan", head, filled, notes=[*_verdict(self), *_remarks(self)])


def _plain(estimate: MemoryEstimate, exchange_is_known: bool) -> dict[str, Any]:
    plain = {field.name: getattr(estimate, field.name) for field in dataclasses.fields(estimate)}
    fields = {name: dict(x) if isinstance(x, Mapping) else x for name, x in plain.items()}
    totals = {
        "device_total": estimate.device_total,
        "host_total": estimate.host_total,
        "exchanged_total": estimate.exchanged_total
        if exchange_is_known or estimate.exchanged
        else None,
    }
    return {**fields, "options": list(estimate.options), **totals}


def _columns(plan: MemoryPlan) -> dict[str, MemoryEstimate]:
    """The columns: as it stands, each option, and the chosen set if it is none of them."""
    estimates = {
        "now": plan.now,
        **{OPTIONS[x].title: estimate for x, estimate in plan.alone.items()},
    }
    if plan.smallest is not None and plan.smallest.options not in ((), *((x,) for x in plan.alone)):
        estimates["chosen"] = plan.smallest
    return estimates


def _text(plan: MemoryPlan) -> str:
    """The table and remarks that ``print(plan)`` shows."""
    estimates, remarks = _columns(plan), _remarks(plan)
    table = aligned(_table(plan, estimates, bytes_text))
    if max(map(len, table)) > WIDTH:
        table = _in_blocks(_table(plan, estimates, _short))
        remarks += _wrapped("K, M and G are KiB, MiB and GiB")
    return "\n".join([*table, "", *remarks, *_verdict(plan)])


def _in_blocks(cells: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table, with its columns in as few blocks as fit the width, one below the other."""
    count = max(map(len, cells)) - 1
    for size in (-(-count // blocks) for blocks in range(1, count + 1)):
        starts = range(1, count + 1, size)
        lines = [
            line
            for start in starts
            for line in aligned([[row[0], *row[start : start + size]] for row in cells])
        ]
        if max(map(len, lines)) <= WIDTH:
            return lines
    return aligned(cells, width=WIDTH)


def _short(nbytes: int) -> str:
    """Bytes as in ``ls -h``: 4.48M."""
    return bytes_text(nbytes).replace(" ", "").removesuffix("iB")


def _table(
    plan: MemoryPlan, estimates: Mapping[str, MemoryEstimate], text: Callable[[int], str]
) -> list[list[str]]:
    """The cells of the table, with bytes formatted by ``text``."""
    columns = list(estimates.values())
    lines = [
        ["on the device", *estimates],
        *_rows([estimate.device for estimate in columns], text, mark=ESTIMATED),
        ["total", *(text(estimate.device_total) for estimate in columns)],
        [
            f"fits {bytes_text(plan.usable_bytes)}",
            *("yes" if plan.fits(estimate) else "no" for estimate in columns),
        ],
        ["compiled", *(_source(plan, estimate) for estimate in columns)],
        ["gradients a step", *(f"{estimate.gradients:.3g}" for estimate in columns)],
    ]
    if any(estimate.host for estimate in columns):
        lines += [
            ["on the host"],
            *_rows([estimate.host for estimate in columns], text, mark=("workspace",)),
            ["total", *(text(estimate.host_total) for estimate in columns)],
        ]
    if plan.devices > 1:
        lines += [
            [f"between {plan.devices} {'sharded ' * plan.fully_sharded}devices"],
            *_rows([estimate.exchanged for estimate in columns], text, mark=()),
            ["total", *(text(x.exchanged_total) if x.exchanged else "–" for x in columns)],
        ]
    return lines


def _source(plan: MemoryPlan, estimate: MemoryEstimate) -> str:
    return "yes" if estimate.compiled else f"±{plan.within:.0%}"


def _rows(
    tables: Sequence[Mapping[str, int]], text: Callable[[int], str], mark: Sequence[str]
) -> list[list[str]]:
    names = dict.fromkeys(name for table in tables for name in table if table[name])
    return [
        [
            f"  {name}" + " ~" * (name in mark),
            *(text(table[name]) if table.get(name) else "–" for table in tables),
        ]
        for name in names
    ]


def _remarks(plan: MemoryPlan) -> list[str]:
    lines = [f"{OPTIONS[x].title}: {estimate.costs[x]}" for x, estimate in plan.alone.items()]
    lines += [f"{OPTIONS[x].title}: not available: {why}" for x, why in plan.unavailable.items()]
    if plan.not_traced:
        lines.append(f"temporaries of the update are not counted: {plan.not_traced}")
    if plan.not_compiled:
        lines.append(f"not compiled: {plan.not_compiled}")
    lines.append(
        f"~: temporaries are for {plan.compiled_for}: compiled, or estimated, whose totals have "
        f"been off by at most {plan.within:.0%}; of activations, workspace and update only the "
        "largest is in the total; scratch of libraries is by formula"
    )
    return [line for text in lines for line in _wrapped(text)]


def _verdict(plan: MemoryPlan) -> list[str]:
    if plan.smallest is None:
        return _wrapped(plan.why_not())
    if not plan.smallest.options:
        return ["it fits as it is"]
    names = " + ".join(OPTIONS[x].title for x in plan.smallest.options)
    lines = [
        f"the smallest set that fits {_room(plan)}: {names}; the arithmetic of a step is "
        f"{plan.smallest.gradients:.3g} times the gradient's"
    ]
    lines += [f"  {OPTIONS[x].title}: {cost}" for x, cost in plan.smallest.costs.items()]
    return [line for text in lines for line in _wrapped(text)]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="    ", replace_whitespace=False)


def _room(plan: MemoryPlan) -> str:
    """Description of the available memory and the limit on cost."""
    headroom_text = f" less {plan.headroom:.0%} of headroom" if plan.headroom else ""
    host = "" if plan.host_bytes is None else f" and {bytes_text(plan.host_bytes)} on the host"
    cost = "" if plan.max_gradients is None else f" at {plan.max_gradients:.3g} gradients a step"
    return f"{bytes_text(plan.device_bytes)}{headroom_text}{host}{cost}"


def _options_text(estimate: MemoryEstimate) -> str:
    """Description of the options of an estimate."""
    return " + ".join(OPTIONS[name].title for name in estimate.options) or "no option"
