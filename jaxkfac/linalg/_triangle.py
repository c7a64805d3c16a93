"""The rectangle of `_packed` inside a traced program, for stacks of matrices."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def fold_triangle(matrix: Float[Array, "*stack n n"]) -> Float[Array, "*stack rows columns"]:
    """Fold the lower triangle of symmetric matrices into a rectangle of half the elements.

    The layout is :func:`jaxkfac.linalg._packed.pack`'s. Slices, pads and one select: no
    gather, which a GPU would run far below the speed of its memory.

    Args:
        matrix: ``(stack..., n, n)``; the upper triangle is never read.

    Returns:
        ``(stack..., *packed_shape(n))``.
    """
    n = matrix.shape[-1]
    columns = n - n // 2
    out = _padded(matrix[..., :, :columns], top=1 - n % 2)
    corner = _padded(matrix[..., columns:, columns:].mT, left=n % 2, bottom=out.shape[-2] - n // 2)
    return jnp.where(_folded(n), corner, out)


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


def _folded(n: int) -> Array:
    """True where the rectangle holds the last corner: on and above a diagonal of its top."""
    rows, columns = n + 1 - n % 2, n - n // 2
    row, column = jnp.arange(rows)[:, None], jnp.arange(columns)[None]
    return column - n % 2 >= row


def _padded(x: Array, *, top: int = 0, bottom: int = 0, left: int = 0) -> Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(top, bottom), (left, 0)])
