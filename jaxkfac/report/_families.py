"""Layers that differ only in their depth: slices of a stack, or numbered names."""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxkfac.report._spectra import Side, SpectrumRecord

# A number that is a whole component, an index in brackets, or after an underscore.
_NUMBER = re.compile(r"(?:(?<=[/_\[])|^)\d+(?=[/\]]|$)")


class FactorFamily(NamedTuple):
    """The same factor at every depth.

    Attributes:
        title: The layer's name without ``/kernel``, with ``*`` for its number if there are
            several; readers of a shared input are listed behind each other.
        side: Which factor.
        members: From the first depth to the last.
    """

    title: str
    side: Side
    members: list[SpectrumRecord]


def families(
    records: Sequence[SpectrumRecord], *, shared_once: bool, apart: bool = False
) -> list[FactorFamily]:
    """Group the records of all depths, in the order of the network.

    Args:
        records: Of all factors.
        shared_once: Leave an input factor out where it is another layer's, and name all its
            readers where it is stored.
        apart: Whether layers whose names differ in a number are families of their own.
    """
    name_of = str if apart else lambda layer: _NUMBER.sub("*", layer)
    groups: dict[tuple[str, Side], list[SpectrumRecord]] = {}
    readers: dict[str, list[str]] = {}
    for record in records:
        family = name_of(record.layer)
        if record.side == "A":
            names = readers.setdefault(name_of(record.source), [])
            names += [family] if family not in names else []
        if record.source == record.layer or record.side != "A" or not shared_once:
            groups.setdefault((family, record.side), []).append(record)
    found = []
    for (family, side), members in groups.items():
        names = {record.layer for record in members}
        title = family if len(names) > 1 else names.pop()
        if side == "A" and shared_once:
            title = joined([title, *readers[family][1:]])
        found.append(FactorFamily(title.removesuffix("/kernel"), side, sorted(members, key=_depth)))
    return found


def joined(names: Sequence[str]) -> str:
    """``a/q, k, v`` for the readers ``a/q/kernel``, ``a/k/kernel`` and ``a/v/kernel``."""
    short = [name.removesuffix("/kernel") for name in names]
    folder, _, first = short[0].rpartition("/")
    last = ", ".join([first, *(name.rpartition("/")[2] for name in short[1:])])
    return f"{folder}/{last}" if folder else last


def ends(values: Iterable[float]) -> tuple[float, float]:
    """Smallest and largest positive value; (1, 1) without any."""
    positive = [value for value in values if value > 0]
    return (min(positive), max(positive)) if positive else (1.0, 1.0)


def _depth(record: SpectrumRecord) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(int(n) for n in _NUMBER.findall(record.layer)), record.slice
