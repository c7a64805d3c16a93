"""Capacity over depth: a row for each block of a stack."""

from collections.abc import Iterator
from typing import NamedTuple

from jaxkfac._text import number
from jaxkfac.curvature import CapacityRecord
from jaxkfac.report._capacity import CapacityReport


class DepthStack(NamedTuple):
    """Layers that are stacked together: the blocks of a decoder, say.

    Attributes:
        name: What their names begin with.
        layers: ``{rest of the name: record of each block}``.
    """

    name: str
    layers: dict[str, tuple[CapacityRecord, ...]]

    @property
    def depth(self) -> int:
        """How many blocks there are."""
        return len(next(iter(self.layers.values())))

    def head(self) -> list[str]:
        """Headings of :meth:`rows`."""
        return ["block", *self.layers, "trace", "share"]

    def rows(self) -> Iterator[list[str]]:
        """Of each block the entropy rank of each layer, its trace, and its share of the stack's."""
        traces = [sum(x[i].trace for x in self.layers.values()) for i in range(self.depth)]
        total = sum(traces)
        for i, trace in enumerate(traces):
            ranks = (number(records[i].entropy_rank) for records in self.layers.values())
            share = f"{trace / total:.1%}" if total else "–"
            yield [str(i), *ranks, number(trace), share]


def stacks_of(report: CapacityReport) -> list[DepthStack]:
    """The stacks of a model, in its order; layers without two factors are left out."""
    found: dict[tuple[str, int], dict[str, tuple[CapacityRecord, ...]]] = {}
    for name, record in report.metrics.layers.items():
        if len(record.slices) < 2 or record.scalars().get("num_above_a") is None:
            continue
        first = "/".join(name.split("/")[:2])
        rest = name.removeprefix(f"{first}/").removesuffix("/kernel")
        found.setdefault((first, len(record.slices)), {})[rest] = record.slices
    return [DepthStack(name, layers) for (name, _), layers in found.items()]
