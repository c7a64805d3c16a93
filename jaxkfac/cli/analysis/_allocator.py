"""The C library's allocator."""

import ctypes
import gc
import sys

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD
_BYTES = 1 << 20


def give_blocks_back() -> None:
    """Have glibc return every freed block of a mebibyte and more to the system.

    It learns to keep ever larger ones, up to 32 MiB, and a peak would be that of all stages
    together. Elsewhere nothing is done.
    """
    _call("mallopt", _MMAP_THRESHOLD, _BYTES)


def give_heap_back() -> None:
    """Have glibc return what is free in its heap: compiling leaves a gigabyte of small blocks."""
    gc.collect()
    _call("malloc_trim", 0)


def _call(name: str, *arguments: int) -> None:
    if sys.platform.startswith("linux"):
        function = getattr(ctypes.CDLL(None), name, None)
        if function is not None:
            function(*arguments)
