"""Static indices into a parameter, and arrays of which parameters are parts."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxkfac.interception._axes import Atoms, AxisTable

# ---------------- static indices into a parameter: numbers and ranges


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


# ---------------- parameters that are parts of one array: concatenated, stacked or padded into it
#
# Along the axis where they were put side by side, the array has atoms of its own, and each of them
# is a run of indices (``Join``). A layer use of the array is one of each part: the statistics of
# its rows of inputs or columns of outputs are those of its own block.


class Join(NamedTuple):
    """Where a parameter lies in an array made of several.

    Attributes:
        whole: The array's axis.
        start: First index there that is the parameter's.
        size: How many are.
        own: The axis of the parameter.
    """

    whole: Atoms
    start: int
    size: int
    own: Atoms


class Piece(NamedTuple):
    """A run of the indices of one atom.

    Attributes:
        start: The first.
        size: How many.
        own: What they are in the parameter's atoms.
    """

    start: int
    size: int
    own: Atoms


def pieces_of(table: AxisTable, joins: Sequence[Join]) -> dict[int, Piece] | None:
    """For each atom of a joined axis, which of its indices are the parameter's.

    A reshape may have split the joined axis. The part is a run of indices of the outermost atom
    then, and all of the others, if its ends lie on their boundaries; else ``None``.
    """
    found: dict[int, Piece] = {}
    for join in joins:
        first, *rest = table.atoms(join.whole)
        sizes = [table.size(a) for a in rest]
        inner = 1
        for size in sizes:
            inner *= size
        if join.start % inner or join.size % inner:
            return None
        own = table.regroup([join.own], [join.size // inner, *sizes])
        if own is None:
            return None
        found[first] = Piece(join.start // inner, join.size // inner, own[0])
        found.update(
            (a, Piece(0, size, mine)) for a, size, mine in zip(rest, sizes, own[1:], strict=True)
        )
    return found


def own_atoms(table: AxisTable, pieces: dict[int, Piece], axis: Atoms) -> Atoms:
    """An axis in the parameter's own atoms."""
    out: list[int] = []
    for atom in table.atoms(axis):
        piece = pieces.get(atom)
        out += [atom] if piece is None else own_atoms(table, pieces, piece.own)
    return tuple(out)


def cuts_of(table: AxisTable, pieces: dict[int, Piece], axis: Atoms) -> tuple[object, ...]:
    """What of an axis is the parameter's; two readings of one array that agree read the same."""
    out: list[object] = []
    for i, atom in enumerate(table.atoms(axis)):
        if atom in pieces:
            start, size, own = pieces[atom]
            if (start, size) != (0, table.size(atom)) or cuts_of(table, pieces, own):
                out.append((i, start, size, cuts_of(table, pieces, own)))
    return tuple(out)
