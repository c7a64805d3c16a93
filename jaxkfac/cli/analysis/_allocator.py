"""The C library's allocator."""

import ctypes
import sys

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD
_BYTES = 1 << 20


def give_blocks_back() -> None:
    """Have glibc return every freed block of a mebibyte and more to the system.

    It learns to keep ever larger ones, up to 32 MiB, and a peak would be that of all stages
    together. Elsewhere nothing is done.
    """
    if sys.platform.startswith("linux"):
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_MMAP_THRESHOLD, _BYTES)
