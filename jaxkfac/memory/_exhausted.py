"""Errors that say that memory ran out: which they are, what they asked for, what to do."""

import errno
import math
import re
from typing import Any

import jax
import numpy as np

from jaxkfac.memory._budget import bytes_text, free_host_bytes, resident_bytes

TROUBLESHOOTING_PAGE = "docs/troubleshooting.md"

_MARKS = re.compile(
    r"RESOURCE_EXHAUSTED.*(memory|alloca)|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation"
    r"|std::bad_alloc|Cannot allocate memory",
    re.DOTALL | re.IGNORECASE,
)
# A kernel's own few hundred KiB: no batch size and no other process changes them.
_SHARED = re.compile(r"shared memory", re.IGNORECASE)
_COUNT = re.compile(r"(\d+) ?(?:bytes|B)\b")
_SIZE = re.compile(r"\b(\d+(?:\.\d+)?) ?([KMGTP])i?B?\b")
_UNITS = {unit: 1024**power for power, unit in enumerate("KMGTP", start=1)}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or one that it was raised from, says that memory ran out.

    ``jax.errors.JaxRuntimeError`` with the status RESOURCE_EXHAUSTED, ``MemoryError`` (NumPy's and
    :class:`MemoryBudgetError` among them), and ``OSError`` with ``ENOMEM``. A compiler that finds
    a kernel's shared memory too small has the same status and is not meant.

    Example:
        >>> import jaxkfac as jk
        >>> jk.memory.is_out_of_memory(MemoryError()), jk.memory.is_out_of_memory(KeyError())
        (True, False)
    """
    return _root(error) is not None


def asked_bytes(error: BaseException) -> int | None:
    """The bytes that could not be had, as the error says them; ``None`` if it does not."""
    root = _root(error)
    if root is None:
        return None
    shape, dtype = getattr(root, "shape", None), getattr(root, "dtype", None)
    if isinstance(shape, tuple) and isinstance(dtype, np.dtype):  # NumPy's
        return math.prod(shape) * dtype.itemsize
    words = str(root)
    if exact := _COUNT.search(words):
        return int(exact[1])
    if rounded := _SIZE.search(words):
        return round(float(rounded[1]) * _UNITS[rounded[2]])
    return None


def explain_out_of_memory(error: BaseException) -> str:
    """What was asked for, what there is, and what to try first.

    Call it while the error is handled: what the failed step held is then still in use.

    Args:
        error: One for which :func:`is_out_of_memory` is true.

    Returns:
        A paragraph.

    Raises:
        ValueError: an error of another kind.

    Example:
        >>> import jaxkfac as jk
        >>> try:
        ...     raise MemoryError("std::bad_alloc")  # where your own step is called
        ... except (MemoryError, RuntimeError) as error:
        ...     words = jk.memory.explain_out_of_memory(error)
        >>> words.startswith("out of memory; in main memory ")
        True
    """
    return f"{what_was_short(error)}. {GENERAL}"


GENERAL = (
    "Try a smaller batch with more accumulation steps (jk.multi_steps), jax.checkpoint around "
    "blocks, parameters in bfloat16, jk.HostCurvature or max_factor_bytes= for factors; "
    "print(jk.plan_memory(...)) says which of them is enough. Look for other processes and "
    f"second copies too: jaxkfac doctor, jk.memory.duplicate_report(). More: {TROUBLESHOOTING_PAGE}"
)


def what_was_short(error: BaseException) -> str:
    """The first half of :func:`explain_out_of_memory`: the bytes asked for, and those there."""
    if not is_out_of_memory(error):
        raise ValueError(f"expected an error that says that memory ran out, got {error!r}")
    asked = asked_bytes(error)
    words = "" if asked is None else f": {bytes_text(asked)} were asked for"
    places = [_state(device) for device in _counting()] or [_host()]
    return f"out of memory{words}; {'; '.join(places)}"


def _root(error: BaseException | None) -> BaseException | None:
    """The error of the chain that says so itself."""
    while error is not None:
        if isinstance(error, MemoryError):
            return error
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            return error
        words = str(error)
        # JaxRuntimeError is a RuntimeError; a backend that does not start raises a plain one.
        if isinstance(error, RuntimeError) and _MARKS.search(words) and not _SHARED.search(words):
            return error
        error = error.__cause__
    return None


def _counting() -> list[Any]:
    """Devices whose allocator counts."""
    return [device for device in jax.local_devices() if "bytes_limit" in _stats(device)]


def _stats(device: Any) -> dict[str, int]:
    return device.memory_stats() or {}


def _state(device: Any) -> str:
    stats = _stats(device)
    used, limit = stats.get("bytes_in_use", 0), stats["bytes_limit"]
    return (
        f"{device.platform}:{device.id} has {bytes_text(max(limit - used, 0))} of "
        f"{bytes_text(limit)} free"
    )


def _host() -> str:
    free, held = free_host_bytes(), resident_bytes()
    there = "an unknown number of bytes are" if free is None else f"{bytes_text(free)} are"
    own = "" if held is None else f", and this process holds {bytes_text(held)}"
    return f"in main memory {there} free{own}"
