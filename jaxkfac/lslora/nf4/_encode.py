"""One matrix in NF4, on the host.

In NumPy, because the codes are to be those of bitsandbytes to the last: XLA on a CPU flushes
denormal numbers to zero, and whatever follows a quotient it may fuse and round differently.
qwix has the same levels and blocks (a test holds its codes and scales against these), but neither
the second level of scales nor two codes in a byte, so nothing of it is used here.
"""

import functools

import numpy as np

from jaxkfac.lslora.nf4._levels import (
    MIDPOINTS,
    NESTED_BLOCK,
    nested_codes,
)

_AT_ONCE = 2**20  # elements: temporaries stay in the cache
_SMALLEST = np.float32(1e-38)  # bitsandbytes divides by no smaller scale


def encode(matrix: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of a matrix ``(out, in)``, ``block`` inputs to a scale.

    Returns:
        ``(codes (out, in / 2) uint8, scales (out, in / block) float32)``. Of the two codes in
        a byte the first is in the upper half.

    Raises:
        ValueError: a value is NaN or infinite as float32.
    """
    outs, ins = matrix.shape
    codes = np.empty((outs, ins // 2), np.uint8)
    scales = np.empty((outs, ins // block), np.float32)
    rows = max(1, _AT_ONCE // max(1, ins))
    for start in range(0, outs, rows):
        part = slice(start, start + rows)
        with np.errstate(over="ignore"):  # what is too large for float32 is refused below
            groups = np.asarray(matrix[part], np.float32).reshape(-1, ins // block, block)
        scales[part] = np.abs(groups).max(-1)
        if not np.isfinite(scales[part]).all():
            raise ValueError("NaN or infinite values (as float32)")
        inverse = np.float32(1) / np.maximum(scales[part], _SMALLEST)
        found = _nearest(np.clip(groups * inverse[..., None], -1, 1)).reshape(-1, ins)
        codes[part] = found[:, 0::2] << 4 | found[:, 1::2]
    return codes, scales


def encode_scales(
    scales: np.ndarray, offset: np.float32 | None = None
) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """The second level: scales minus their mean, in 8 bits, 256 to a scale of their own.

    Args:
        scales: Float32, of any shape; blocks run through them in order.
        offset: Their mean. By default it is exact and rounded once; PyTorch's own sum depends
            on its threads and vectors, and differs in the last bits.

    Returns:
        ``(codes like scales, uint8; nested scales; offset)``.
    """
    if offset is None:
        offset = np.float32(scales.mean(dtype=np.float64))
    flat = scales.reshape(-1) - offset
    blocks = np.pad(flat, (0, -flat.size % NESTED_BLOCK)).reshape(-1, NESTED_BLOCK)
    nested = np.abs(blocks).max(-1)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):  # a block of equal scales
        scaled = np.clip(blocks * (np.float32(1) / nested)[:, None], -1, 1)
    grid = (scaled + np.float32(1)) * np.float32(0.5) * np.float32(65535) + np.float32(0.5)
    codes = nested_codes()[np.nan_to_num(grid).astype(np.int32)]
    codes = np.where(nested[:, None] == 0, np.uint8(0), codes)
    return codes.reshape(-1)[: flat.size].reshape(scales.shape), nested, offset


@functools.cache
def _cells() -> tuple[np.ndarray, np.ndarray]:
    """For 64 equal parts of [-1, 1]: the code at the lower end, and the midpoint inside."""
    low = np.arange(65) / 32 - 1
    code = np.searchsorted(MIDPOINTS, low - 1e-3)
    padded = np.append(MIDPOINTS, np.float32(np.inf))
    inside = padded[code] <= low + 1 / 32 + 1e-3
    return code.astype(np.uint8), np.where(inside, padded[code], np.float32(np.inf))


def _nearest(x: np.ndarray) -> np.ndarray:
    """How many midpoints each value exceeds. A part holds one midpoint at most: one compare."""
    codes, midpoints = _cells()
    cell = ((x + np.float32(1)) * np.float32(32)).astype(np.uint8)
    return codes[cell] + (x > midpoints[cell])
