"""Static indices into a parameter: numbers and ranges."""

from collections.abc import Sequence
from typing import NamedTuple


class Range(NamedTuple):
    """Neighbouring indices ``start`` to ``stop`` of an axis of ``size``."""

    start: int
    stop: int
    size: int

    def __str__(self) -> str:
        return ":" if (self.start, self.stop) == (0, self.size) else f"{self.start}:{self.stop}"


Index = tuple[int | Range, ...]


def index_name(index: Index) -> str:
    """As it stands behind the path of a parameter."""
    if any(isinstance(at, Range) for at in index):
        return f"[{','.join(map(str, index))}]"
    return "".join(f"[{at}]" for at in index)


def slices(index: Index) -> tuple[int | slice, ...]:
    """As arrays take it."""
    return tuple(slice(at.start, at.stop) if isinstance(at, Range) else at for at in index)


def shape_of(index: Index, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of ``array[index]``."""
    kept = [at.stop - at.start for at in index if isinstance(at, Range)]
    return (*kept, *shape[len(index) :])


def overlap(one: Index, other: Index) -> bool:
    """Whether two indices into one parameter have elements in common."""

    def ends(at: int | Range) -> tuple[int, int]:
        return (at.start, at.stop) if isinstance(at, Range) else (at, at + 1)

    pairs = [(ends(a), ends(b)) for a, b in zip(one, other, strict=False)]
    return all(max(a[0], b[0]) < min(a[1], b[1]) for a, b in pairs)
