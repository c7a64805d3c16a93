"""Allocation of host arrays: in memory within a budget, beyond it in memory-mapped files."""

import contextlib
import errno
import mmap
import os
import shutil
import tempfile
import threading
import weakref
from pathlib import Path
from typing import Literal

import numpy as np

Storage = Literal["float32", "bfloat16"]  # of averages

_ALIGNMENT = 64  # bytes; arrays that share a file begin at multiples of it, which suit every dtype
# A file stays open while it is mapped, and a process may have about a thousand open files. So small
# arrays share files. A shared file has 1/16 of the bytes on disk, and an array of at most 1/8 of
# that is small. A hundred arrays of one size then have a file each, but thousands take at most 250
# files, which hold at most a fifth more than the arrays.
_SHARE, _SMALL = 16, 8


class Store:
    """Allocates arrays within a budget of host bytes.

    A file is removed from its folder as soon as it is mapped, so that nothing remains however the
    process ends. Its blocks are reserved first, because writing to a mapped file on a full disk
    would kill the process. Small arrays share files, whose blocks are freed with the last array of
    the file.

    Args:
        budget: Bytes of host memory for arrays, ``None`` for no limit.
        disk: Folder for arrays beyond the budget, ``None`` for no disk.
    """

    def __init__(self, budget: int | None, disk: Path | None) -> None:
        self.budget, self.disk = budget, disk
        self._limit = budget
        self.in_memory = 0
        self.on_disk = 0
        self._free_space = memoryview(b"")  # the rest of the newest file that arrays share
        self._lock = threading.RLock()  # reentrant: a finalizer may run while it is held

    def require(self, fixed: int, movable: dict[str, int]) -> None:
        """Refuse a budget that cannot work, before anything is allocated.

        Args:
            fixed: Bytes that are always in memory.
            movable: ``{name: bytes}`` that may be on disk.

        Raises:
            ValueError: the budget is too small; the message has the numbers.
        """
        if self._limit is None:
            return
        needed = fixed + (0 if self.disk else sum(movable.values()))
        if needed > self._limit:
            listing = ", ".join(f"{what} {size}" for what, size in movable.items())
            advice = (
                "raise host_bytes, or lower in_flight_bytes or workers"
                if self.disk or fixed > self._limit
                else "raise host_bytes, or give a folder as disk="
            )
            raise ValueError(
                f"host_bytes={self._limit} is too small: workspace and copies in flight need "
                f"{fixed} bytes, and beside them there are {listing}; {advice}"
            )
        self.budget = self._limit - fixed

    def empty(self, shape: tuple[int, ...], dtype: np.dtype, what: str) -> np.ndarray:
        """An array with unset contents; zeros if it is on disk.

        Raises:
            OSError: the disk is full (the message has ``what``, the bytes and the free space);
                or too many files are open.
            MemoryError: the budget is used up and there is no disk.
        """
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        with self._lock:
            if self.budget is None or self.in_memory + nbytes <= self.budget:
                array = np.empty(shape, dtype)
                self.in_memory += nbytes
                self._count(array, "in_memory", nbytes)
                return array
        if self.disk is None:
            raise MemoryError(
                f"{what} needs {nbytes} bytes of host memory, and {self.in_memory} of the "
                f"{self.budget} for arrays are used; raise host_bytes, or give a folder as disk="
            )
        with self._lock:
            memory = self._in_file(self.disk, nbytes, what)
            self.on_disk += nbytes
        array = np.frombuffer(memory, np.uint8, nbytes).view(dtype).reshape(shape)
        self._count(array, "on_disk", nbytes)
        return array

    def _in_file(self, folder: Path, nbytes: int, what: str) -> memoryview:
        size = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        share = self.on_disk // _SHARE
        if size * _SMALL <= share and size > len(self._free_space):
            with contextlib.suppress(OSError):  # the disk may still have room for the one array
                self._free_space = _mapped(folder, share, what)
        if size > len(self._free_space):
            return _mapped(folder, nbytes, what)
        memory, self._free_space = self._free_space[:size], self._free_space[size:]
        return memory

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype, what: str) -> np.ndarray:
        """Like :meth:`empty`, set to zero."""
        array = self.empty(shape, dtype, what)
        array[...] = 0
        return array

    def _count(self, array: np.ndarray, where: str, nbytes: int) -> None:
        weakref.finalize(array, self._freed, where, nbytes).atexit = False

    def _freed(self, where: str, nbytes: int) -> None:
        with self._lock:
            setattr(self, where, getattr(self, where) - nbytes)


def _mapped(folder: Path, nbytes: int, what: str) -> memoryview:
    try:
        with tempfile.TemporaryFile(prefix="jaxkfac-", dir=folder) as file:
            _reserve(file.fileno(), max(nbytes, 1))
            buffer = mmap.mmap(file.fileno(), max(nbytes, 1))
    except OSError as error:
        if error.errno == errno.EMFILE:
            raise OSError(
                error.errno,
                f"{what} needs a file in {folder}, and too many files are open: raise "
                "`ulimit -n`, or scan the blocks of the model so that there are fewer arrays",
            ) from error
        free = shutil.disk_usage(folder).free if folder.is_dir() else 0
        raise OSError(
            error.errno,
            f"{what} needs {nbytes} bytes on disk and {folder} has {free} free "
            f"({os.strerror(error.errno or 0)}); free some, or choose another disk=",
        ) from error
    return memoryview(buffer)


def _reserve(file: int, nbytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, nbytes)
        return
    zeros = bytes(min(nbytes, 1 << 20))  # a hole in the file would reserve nothing
    for start in range(0, nbytes, len(zeros)):
        os.pwrite(file, zeros[: nbytes - start], start)
