"""NumPy memory that XLA on the CPU takes over as it is, instead of copying it."""

import math

import numpy as np

_ALIGNMENT = 64  # bytes, that XLA asks of every buffer


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array without values, in aligned memory of its own."""
    nbytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + nbytes].view(dtype).reshape(shape)
