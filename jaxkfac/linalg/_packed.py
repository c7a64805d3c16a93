"""Symmetric matrices in half the bytes: the lower triangle folded into a rectangle."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

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


def fold_triangle(matrix: Float[Array, "*stack n n"]) -> Float[Array, "*stack rows columns"]:
    """Fold the lower triangle of symmetric matrices into a rectangle of half the elements.

    The layout is that of :func:`pack`. It takes slices, pads and one select, but no gather, which a
    GPU would run far below the speed of its memory.

    Args:
        matrix: ``(stack..., n, n)``; the upper triangle is never read.

    Returns:
        ``(stack..., *packed_shape(n))``.
    """
    n = matrix.shape[-1]
    columns = n - n // 2
    out = _padded(matrix[..., :, :columns], top=1 - n % 2)
    corner = _padded(matrix[..., columns:, columns:].mT, left=n % 2, bottom=out.shape[-2] - n // 2)
    return jnp.where(_holds_corner(n), corner, out)


def unfold_triangle(
    rectangle: Float[Array, "*stack rows columns"],
) -> Float[Array, "*stack n n"]:
    """The symmetric matrices that :func:`fold_triangle` folded, both triangles written."""
    rows, columns = rectangle.shape[-2:]
    n = rows - (rows == 2 * columns + 1)
    corner = rectangle[..., : n // 2, n % 2 :].mT
    right = _padded(corner, top=columns)
    matrix = jnp.concatenate([rectangle[..., 1 - n % 2 :, :], right], -1)
    return jnp.where(jnp.tri(n, dtype=bool), matrix, matrix.mT)


def _holds_corner(n: int) -> Array:
    """True where the rectangle holds the last corner: on and above a diagonal at its top."""
    rows, columns = n + 1 - n % 2, n - n // 2
    row, column = jnp.arange(rows)[:, None], jnp.arange(columns)[None]
    return column - n % 2 >= row


def _padded(x: Array, *, top: int = 0, bottom: int = 0, left: int = 0) -> Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(top, bottom), (left, 0)])
