"""The two code books: 16 levels for weights, 256 for the scales of their blocks."""

import functools

import numpy as np

# QLoRA (Dettmers, Pagnoni, Holtzman, Zettlemoyer, 2023), appendix E: quantiles of the normal
# distribution, scaled to [-1, 1], with an exact zero. These are the float32 values that
# bitsandbytes writes into its files.
LEVELS = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)

# A value belongs to the level above if it is larger than the midpoint, rounded to float32.
MIDPOINTS = (LEVELS[:-1] + LEVELS[1:]) / np.float32(2)

NESTED_BLOCK = 256  # scales that share one scale of the second level


@functools.cache
def nested_levels() -> np.ndarray:
    """The dynamic 8-bit levels: seven decades, each with twice the resolution of the last.

    8-bit Approximations for Parallelism in Deep Learning (Dettmers, 2016). Decade ``e`` holds
    the centres of ``2**e`` equal parts of [0.1, 1], with both signs. The ends of the parts are
    counted from the nearer end of the interval and rounded once, which is how PyTorch's
    ``linspace`` arrives at the numbers in bitsandbytes' files.
    """
    low, high = np.float32(0.1), np.float32(1)
    levels = [np.zeros(1, np.float32), np.ones(1, np.float32)]
    for decade in range(7):
        parts = 2**decade
        step = np.float64((high - low) / np.float32(parts))
        i = np.arange(parts + 1)
        ends = np.where(i < (parts + 1) // 2, low + step * i, high - step * (parts - i))
        ends = ends.astype(np.float32)
        centres = np.float32(10.0 ** (decade - 6)) * ((ends[:-1] + ends[1:]) / np.float32(2))
        levels += [centres, -centres]
    return np.sort(np.concatenate(levels))


@functools.cache
def nested_codes() -> np.ndarray:
    """The code of every one of 65536 equidistant values in [-1, 1].

    bitsandbytes on the CPU rounds a scale to this grid first and then to the nearest level, the
    lower one of two. Below 3e-5 the grid is coarser than the levels, and zero is no grid point:
    a scale equal to the mean gets code 131, 2e-6 of its block's largest deviation.
    """
    levels = nested_levels()
    grid = np.float32(-1) + np.float32(2) * np.arange(65536, dtype=np.float32) / np.float32(65535)
    above = np.searchsorted(levels, grid, side="left")
    right = np.clip(above, 1, 255)
    nearer = np.abs(levels[right] - grid) < np.abs(grid - levels[right - 1])
    return np.where(above == 0, 0, np.where(nearer, right, right - 1)).astype(np.uint8)
