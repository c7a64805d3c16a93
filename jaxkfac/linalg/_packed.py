"""Symmetric matrices in half the bytes: the lower triangle folded into a rectangle."""

from types import ModuleType
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np

_BLOCK = 64  # rows copied at once: transposing larger blocks leaves the cache
_UPPER = np.tri(_BLOCK, dtype=bool).T


def packed_shape(n: int) -> tuple[int, int]:
    """Shape of the rectangle that holds one triangle of an ``(n, n)`` matrix.

    It has ``n (n + 1) / 2`` elements, exactly as many as the triangle.
    """
    corner = n // 2
    return n + 1 - n % 2, n - corner


def pack(matrix: np.ndarray, out: np.ndarray) -> np.ndarray:
    r"""Fold the lower triangle of a symmetric matrix into a rectangle.

    With $M = \begin{pmatrix} M_{11} & \cdot \\ M_{21} & M_{22} \end{pmatrix}$ cut in the
    middle, the first columns $(M_{11}; M_{21})$ are stored unchanged, and $M_{22}^\top$ goes
    into the unused upper triangle of $M_{11}$ (LAPACK's rectangular full packed format, by
    rows). Full blocks are copied, so it runs at the speed of memory; the upper triangle is
    never read.

    Args:
        matrix: ``(n, n)``; cast to the dtype of ``out``.
        out: ``packed_shape(n)``, written over.

    Returns:
        ``out``.

    Example:
        >>> import numpy as np
        >>> m = np.array([[1.0, 2.0, 4.0], [2.0, 3.0, 5.0], [4.0, 5.0, 6.0]])
        >>> pack(m, np.empty(packed_shape(3))).tolist()
        [[1.0, 6.0], [2.0, 3.0], [4.0, 5.0]]

    References:
        Gustavson, Wasniewski, Dongarra and Langou, Rectangular full packed format for
        Cholesky's algorithm, 2010.
    """
    n = matrix.shape[-1]
    columns = out.shape[1]
    out[1 - n % 2 :] = matrix[:, :columns]
    _copy_triangle(_folded(out, n), matrix[columns:, columns:].T)
    return out


def unpack(packed: np.ndarray, n: int) -> np.ndarray:
    """The ``(n, n)`` matrix that :func:`pack` folded, both triangles written, bitwise equal."""
    matrix = np.empty((n, n), packed.dtype)
    columns = packed.shape[1]
    matrix[:, :columns] = packed[1 - n % 2 :]
    corner = matrix[columns:, columns:]
    _copy_triangle(corner.T, _folded(packed, n))
    _copy_triangle(matrix, matrix.T)
    return matrix


def _folded(packed: np.ndarray, n: int) -> np.ndarray:
    """The square whose upper triangle holds the transposed last corner."""
    return packed[: n // 2, n % 2 :]


def _copy_triangle(target: np.ndarray, source: np.ndarray) -> None:
    """Copy the upper triangle and the diagonal; the two may be transposes of one array."""
    n = len(target)
    for start in range(0, n, _BLOCK):
        stop = min(start + _BLOCK, n)
        target[start:stop, stop:] = source[start:stop, stop:]
        upper = _UPPER[: stop - start, : stop - start]
        block = source[start:stop, start:stop].copy()
        np.copyto(target[start:stop, start:stop], block, where=upper)


# ---------------- the same rectangle inside a traced program, for stacks of matrices


AnyArray = Any  # a JAX or NumPy array, which a function returns as it came


@runtime_checkable
class HasShape(Protocol):
    """An array, or the shape and dtype of one."""

    @property
    def shape(self) -> tuple[int, ...]: ...


def fold_triangle(matrix: AnyArray) -> AnyArray:
    """Fold the lower triangle of symmetric matrices into a rectangle of half the elements.

    The layout is that of :func:`pack`. It takes slices, pads and one select, but no gather, which a
    GPU would run far below the speed of its memory.

    Args:
        matrix: ``(stack..., n, n)``; the upper triangle is never read. NumPy in, NumPy out.

    Returns:
        ``(stack..., *packed_shape(n))``.
    """
    xp, n = _numpy_of(matrix), matrix.shape[-1]
    columns = n - n // 2
    out = _padded(matrix[..., :, :columns], top=1 - n % 2)
    corner = _padded(matrix[..., columns:, columns:].mT, left=n % 2, bottom=out.shape[-2] - n // 2)
    return xp.where(_holds_corner(xp, n), corner, out)


def unfold_triangle(rectangle: AnyArray) -> AnyArray:
    """The symmetric matrices that :func:`fold_triangle` folded, both triangles written."""
    xp, n = _numpy_of(rectangle), unfolded_size(rectangle)
    columns = rectangle.shape[-1]
    stored = rectangle[..., 1 - n % 2 :, :]
    first, between = stored[..., :columns, :], stored[..., columns:, :]
    last = rectangle[..., : n // 2, n % 2 :]  # transposed
    lower = xp.tri(columns, dtype=bool), xp.tri(columns, k=-1, dtype=bool)
    upper = ~xp.tri(n // 2, k=-1, dtype=bool), ~xp.tri(n // 2, dtype=bool)
    top = xp.concatenate([_mirrored(first, *lower), between.mT], -1)
    return xp.concatenate([top, xp.concatenate([between, _mirrored(last, *upper)], -1)], -2)


def _mirrored(matrix: AnyArray, triangle: AnyArray, without_diagonal: AnyArray) -> AnyArray:
    # A select between a matrix and its transpose, which says the same, is unrolled element by
    # element by XLA 0.10's compiler for CPUs: 100 s at n = 1000. Adding -0 changes no bits, except
    # that XLA on a CPU flushes denormal numbers to zero.
    xp, zero = _numpy_of(matrix), matrix.dtype.type(-0.0)
    return xp.where(triangle, matrix, zero) + xp.where(without_diagonal, matrix, zero).mT


def is_folded(x: HasShape) -> bool:
    """Whether an array of symmetric matrices is folded.

    A folded one is square only for n = 1, where it is the matrix itself.
    """
    return x.shape[-1] != x.shape[-2]


def unfolded_size(x: HasShape) -> int:
    """The size ``n`` of symmetric matrices, folded or not."""
    rows, columns = x.shape[-2:]
    return rows - (rows == 2 * columns + 1)


def unfolded(x: AnyArray) -> AnyArray:
    """Symmetric matrices ``(stack..., n, n)``, whether ``x`` is folded or not."""
    return unfold_triangle(x) if is_folded(x) else x


def diagonal(matrix: AnyArray) -> AnyArray:
    """The diagonals ``(stack..., n)`` of symmetric matrices, folded or not.

    They are slices: on a CPU a gather compiles slower, and a mask writes a matrix.
    """
    rows, columns = matrix.shape[-2:]
    flat = matrix.reshape(*matrix.shape[:-2], rows * columns)
    if not is_folded(matrix):
        return flat[..., :: columns + 1]
    n = unfolded_size(matrix)
    first = flat[..., (1 - n % 2) * columns :: columns + 1][..., :columns]
    corner = flat[..., n % 2 :: columns + 1][..., : n // 2]
    return _numpy_of(matrix).concatenate([first, corner], -1)


def _numpy_of(x: object) -> Any:
    return np if isinstance(x, np.ndarray) else jnp


def _holds_corner(xp: ModuleType, n: int) -> AnyArray:
    """True where the rectangle holds the last corner: on and above a diagonal at its top."""
    rows, columns = packed_shape(n)
    row, column = xp.arange(rows)[:, None], xp.arange(columns)[None]
    return column - n % 2 >= row


def _padded(x: AnyArray, *, top: int = 0, bottom: int = 0, left: int = 0) -> AnyArray:
    return _numpy_of(x).pad(x, [(0, 0)] * (x.ndim - 2) + [(top, bottom), (left, 0)])
