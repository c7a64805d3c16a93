"""Clipping of measured eigenvalues (EKFAC)."""

from jaxtyping import Array

from jaxkfac.linalg import clip_eigenvalues


def clip_block(values: Array, max_condition: float, floor: float) -> Array:
    """Clip ``(stack..., in, out)``, the largest sought over each block."""
    rows = values.reshape(*values.shape[:-2], -1)
    return clip_eigenvalues(rows, max_condition, floor).reshape(values.shape)
