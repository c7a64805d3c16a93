"""Static indices into a parameter, and arrays that are composed of parameters."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxkfac.interception.values._axes import Atoms, AxisTable

# ---------------- static indices


class Range(NamedTuple):
    """The consecutive indices ``start`` to ``stop`` of an axis of ``size``."""

    start: int
    stop: int
    size: int

    def __str__(self) -> str:
        return ":" if (self.start, self.stop) == (0, self.size) else f"{self.start}:{self.stop}"


Index = tuple[int | Range, ...]


def index_name(index: Index) -> str:
    """The index in the form that follows the path of a parameter in names."""
    if any(isinstance(at, Range) for at in index):
        return f"[{','.join(map(str, index))}]"
    return "".join(f"[{at}]" for at in index)


def slices(index: Index) -> tuple[int | slice, ...]:
    """The index in the form that arrays take."""
    return tuple(slice(at.start, at.stop) if isinstance(at, Range) else at for at in index)


def shape_of(index: Index, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of ``array[index]``."""
    range_sizes = [at.stop - at.start for at in index if isinstance(at, Range)]
    return (*range_sizes, *shape[len(index) :])


def overlap(first: Index, second: Index) -> bool:
    """Whether two indices into one parameter have elements in common."""

    def ends(at: int | Range) -> tuple[int, int]:
        return (at.start, at.stop) if isinstance(at, Range) else (at, at + 1)

    pairs = [(ends(a), ends(b)) for a, b in zip(first, second, strict=False)]
    return all(max(a[0], b[0]) < min(a[1], b[1]) for a, b in pairs)


# ---------------- parameters as parts of one array
#
# Parameters may be concatenated, stacked or padded into one array. Along the joined axis the array
# has its own atoms, and each parameter is a run of indices (``Join``). A layer use of the array is
# one use of each parameter in it: the statistics of its rows of inputs or columns of outputs are
# those of its own block.


class Join(NamedTuple):
    """The place of a parameter in an array composed of several.

    Attributes:
        array_axis: The array's axis.
        start: The first index along it that belongs to the parameter.
        size: The number of indices.
        parameter_axis: The axis of the parameter.
    """

    array_axis: Atoms
    start: int
    size: int
    parameter_axis: Atoms


class Piece(NamedTuple):
    """A run of the indices of one atom.

    Attributes:
        start: The first index.
        size: The number of indices.
        parameter_atoms: The parameter's atoms along the run.
    """

    start: int
    size: int
    parameter_atoms: Atoms


def pieces_of(table: AxisTable, joins: Sequence[Join]) -> dict[int, Piece] | None:
    """For each atom of a joined axis, the run of its indices that belongs to the parameter.

    A reshape may have split the joined axis. The parameter is then a run of indices of the
    outermost atom, in full along the other atoms, provided its ends lie on their boundaries;
    otherwise the result is ``None``.
    """
    pieces: dict[int, Piece] = {}
    for join in joins:
        first, *inner_atoms = table.atoms(join.array_axis)
        sizes = [table.size(a) for a in inner_atoms]
        inner = 1
        for size in sizes:
            inner *= size
        if join.start % inner or join.size % inner:
            return None
        own_axes = table.regroup([join.parameter_axis], [join.size // inner, *sizes])
        if own_axes is None:
            return None
        pieces[first] = Piece(join.start // inner, join.size // inner, own_axes[0])
        pieces.update(
            (a, Piece(0, size, mine))
            for a, size, mine in zip(inner_atoms, sizes, own_axes[1:], strict=True)
        )
    return pieces


def own_atoms(table: AxisTable, pieces: dict[int, Piece], axis: Atoms) -> Atoms:
    """An axis in the parameter's own atoms."""
    out: list[int] = []
    for atom in table.atoms(axis):
        piece = pieces.get(atom)
        out += [atom] if piece is None else own_atoms(table, pieces, piece.parameter_atoms)
    return tuple(out)


def cuts_of(table: AxisTable, pieces: dict[int, Piece], axis: Atoms) -> tuple[object, ...]:
    """The runs of an axis that are the parameter's; equal for readings of the same part of it."""
    out: list[object] = []
    for i, atom in enumerate(table.atoms(axis)):
        if atom in pieces:
            start, size, own_axis = pieces[atom]
            if (start, size) != (0, table.size(atom)) or cuts_of(table, pieces, own_axis):
                out.append((i, start, size, cuts_of(table, pieces, own_axis)))
    return tuple(out)
