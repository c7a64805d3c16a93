"""Free memory: the check before a large allocation, and errors that say memory ran out."""

import contextlib
import decimal
import errno
import fractions
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, SupportsIndex

import jax
import numpy as np

from jaxkfac._errors import JaxkfacError

# ---------------- sizes with units: 80GB, 74.5GiB, 80e9


ByteSize = int | float | str | SupportsIndex

_SIZE = re.compile(r"\s*([+-]?[\d_.]+(?:e[+-]?\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)
_POWERS = {letter: power for power, letter in enumerate("kmgtp", start=1)}
_UNITS = {"": 1, "b": 1, "byte": 1, "bytes": 1}
_UNITS |= {f"{letter}b": 1000**power for letter, power in _POWERS.items()}
_UNITS |= {f"{letter}ib": 1024**power for letter, power in _POWERS.items()}

ACCEPTED = 'a positive number of bytes, as 80e9, or a size with a unit, as "80GB" or "74.5GiB"'


def parse_bytes(size: ByteSize, *, name: str = "size") -> int:
    """Convert a size to bytes.

    Every argument of this library that takes bytes accepts the forms described here.

    Args:
        size: A number of bytes, or a string of a number and a unit: ``B``, ``kB``, ``MB``,
            ``GB``, ``TB``, ``PB`` are powers of 1000; ``KiB``, ``MiB``, ``GiB``, ``TiB``,
            ``PiB`` powers of 1024. Case and spaces do not matter.
        name: Name of the argument, for the error.

    Returns:
        Whole bytes, rounded down.

    Raises:
        ValueError: the unit is unknown, or the size is less than one byte; lists the accepted
            forms.

    Example:
        >>> import jaxkfac as jk
        >>> [jk.memory.parse_bytes(size) for size in ("80GB", "74.5 gib", 8e9)]
        [80000000000, 79993765888, 8000000000]
    """
    number, unit = size, 1
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        if match is None or match[2].lower() not in _UNITS:
            raise ValueError(f"{name}={size!r}: expected {ACCEPTED}")
        number, unit = match[1], _UNITS[match[2].lower()]
    try:
        # Exact, because a float cannot represent every count of bytes: 2.01GB would be one less.
        if isinstance(number, SupportsIndex):
            nbytes = number.__index__() * unit
        elif math.isfinite(float(number)):
            exact = decimal.Decimal(number if isinstance(number, str) else float(number))
            nbytes = math.floor(fractions.Fraction(exact) * unit)
        else:
            nbytes = 0
    except (TypeError, ValueError):
        nbytes = 0
    if isinstance(size, bool | np.bool_) or nbytes < 1:
        raise ValueError(f"{name}={size!r}: expected {ACCEPTED}")
    return nbytes


# ---------------- main memory of this process, from the kernel


_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
# The kernel sums pages over threads, so both numbers lag a little.
_SLACK = 4 << 20


def resident_bytes() -> int | None:
    """Bytes of main memory that the process uses now; ``None`` on systems other than Linux."""
    return _field("VmRSS")


def address_space_bytes() -> int | None:
    """Bytes of address space that the process has mapped; ``None`` on systems other than Linux."""
    return _field("VmSize")


def resident_mark() -> int | None:
    """The largest :func:`resident_bytes` so far, or since :func:`lower_mark` was called."""
    return _field("VmHWM")


def lower_mark() -> bool:
    """Set the mark to what is resident now; ``False`` where that is not allowed.

    The mark belongs to the process, so every reader of it sees the lowered value.
    """
    with contextlib.suppress(OSError):
        _CLEAR.write_text("5")
        mark, now = resident_mark(), resident_bytes()
        # A sandboxed kernel may accept the write without any effect.
        return mark is not None and now is not None and mark <= now + _SLACK
    return False


def _field(name: str) -> int | None:
    try:
        match = re.search(rf"^{name}:\s*(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) * 1024 if match else None


# ---------------- free memory


_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


class MemoryBudgetError(JaxkfacError, MemoryError):
    """An allocation would not fit; raised before it is attempted."""


def free_bytes(device: Any) -> int | None:
    """Bytes that an accelerator's allocator can still hand out.

    Args:
        device: A ``jax.Device``.

    Returns:
        The allocator's limit minus the bytes in use; fragmented memory counts as free. ``None``
        where no such count exists, as on the CPU: see :func:`free_host_bytes`.
    """
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return max(stats["bytes_limit"] - stats.get("bytes_in_use", 0), 0)


def free_host_bytes() -> int | None:
    """Bytes of main memory that this process can still take without swapping.

    This is the kernel's estimate, or what remains of a container's limit, of a scheduler's for the
    job (cgroups) or of the process's own (``ulimit -v``) if that is less. The page cache counts as
    free, because it gives way.

    Returns:
        Bytes; ``None`` on systems other than Linux.
    """
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    available = [int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable:")]
    if not available:
        return None
    limits = [x for x in (_container_bytes(), _process_bytes()) if x is not None]
    return min([available[0], *limits])


def require(
    nbytes: ByteSize,
    *,
    device: Any,
    what: str,
    otherwise: Literal["raise", "host"] = "raise",
    fraction: float = 1.0,
    instead: str = "ask for less, or free arrays first (jk.memory.duplicate_report() finds some)",
) -> Literal["device", "host"]:
    """Check that a large allocation fits: return where to put it, or raise with the numbers.

    Nothing is reserved. An unknown limit counts as no limit.

    Args:
        nbytes: Size of the allocation, in bytes or as ``"2GB"``.
        device: The preferred ``jax.Device``. For a CPU device, main memory is checked.
        what: Name of the allocation, for the error.
        otherwise: What to do if ``device`` has no room: ``"host"`` returns ``"host"`` if main
            memory has room; ``"raise"`` raises without checking main memory.
        fraction: Fraction of the free memory that may be used, in (0, 1]; the remainder allows for
            fragmentation and for other allocations.
        instead: Advice in the error.

    Returns:
        ``"device"`` or ``"host"``.

    Raises:
        MemoryBudgetError: with the bytes needed and the bytes free.

    Example:
        >>> import jax, jaxkfac as jk
        >>> jk.memory.require(2**20, device=jax.devices()[0], what="a small factor")
        'device'
        >>> jk.memory.require(2**60, device=jax.devices("cpu")[0], what="a factor")
        Traceback (most recent call last):
        jaxkfac.memory._budget.MemoryBudgetError: a factor needs 1.07e+09 GiB on ...
    """
    needed = parse_bytes(nbytes, name="nbytes") if nbytes else 0
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction must lie in (0, 1], got {fraction}")
    on_cpu = device.platform == "cpu"
    free = free_host_bytes() if on_cpu else free_bytes(device)
    if free is None or needed <= fraction * free:
        return "device"
    free_texts = [f"{bytes_text(free)} are free there"]
    if otherwise == "host" and not on_cpu:
        host = free_host_bytes()
        if host is None or needed <= fraction * host:
            return "host"
        free_texts.append(f"{bytes_text(host)} are free in main memory")
    if fraction < 1:
        free_texts.append(f"of which {fraction:.0%} may be taken")
    raise MemoryBudgetError(
        f"{what} needs {bytes_text(needed)} on {device}; {', '.join(free_texts)}: {instead}"
    )


def bytes_text(nbytes: int | float) -> str:
    """Format bytes with three digits and a binary unit."""
    for unit in ("B", "KiB", "MiB"):
        if abs(nbytes) < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.3g} GiB"


def _container_bytes() -> int | None:
    """Bytes left under the limits of the process's memory cgroup and of those around it."""
    left = [_bytes_left(folder, limit, usage) for folder, limit, usage in _cgroups()]
    return min((nbytes for nbytes in left if nbytes is not None), default=None)


def _cgroups() -> Iterator[tuple[Path, str, str]]:
    """Folders of these cgroups, with the names of the files that hold limit and usage.

    A container sees its own cgroup as the top one. Elsewhere (a job of a scheduler, a service) it
    lies below.
    """
    own_paths: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError):
        for line in _OWN_CGROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            own_paths |= dict.fromkeys(controllers.split(","), path)
    for controller, top, limit, usage in (
        ("", _CGROUP, "memory.max", "memory.current"),  # version 2
        ("memory", _CGROUP / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        components = [x for x in own_paths.get(controller, "").split("/") if x]
        for depth in range(1 + len(components) * (".." not in components)):
            yield top.joinpath(*components[:depth]), limit, usage


def _bytes_left(folder: Path, limit: str, usage: str) -> int | None:
    """Bytes left under the limit of one cgroup, if it has a limit."""
    try:
        most = (folder / limit).read_text().strip()
        used = int((folder / usage).read_text())
        stat = (folder / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):
        return None
    if not most.isdigit():  # "max"
        return None
    cache = sum(int(x.split()[1]) for x in stat if x.startswith("inactive_file "))
    return max(int(most) - used + cache, 0)


def _process_bytes() -> int | None:
    """Bytes left under the process's address space limit, if there is one."""
    used = address_space_bytes()
    if used is None:  # not Linux, where the module imported below may be missing
        return None
    import resource

    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if most == resource.RLIM_INFINITY else max(most - used, 0)


# ---------------- errors that say memory ran out: recognizing and explaining them


TROUBLESHOOTING_PAGE = "docs/troubleshooting.md"

_MARKS = re.compile(
    r"RESOURCE_EXHAUSTED.*(memory|alloca)|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation"
    r"|std::bad_alloc|Cannot allocate memory",
    re.DOTALL | re.IGNORECASE,
)
# A compiler's limit of a few hundred KiB, which no batch size and no other process changes.
_SHARED = re.compile(r"shared memory", re.IGNORECASE)
_COUNT = re.compile(r"(?<![\d.])(\d+) ?(?:bytes|B)\b")  # not the decimals of 16.00B
_REPORTED_SIZE = re.compile(r"\b(\d+(?:\.\d+)?) ?([KMGTP])i?B?\b")
_REPORTED_UNITS = {unit: 1024**power for power, unit in enumerate("KMGTP", start=1)}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or its cause, says that memory ran out.

    This recognizes ``jax.errors.JaxRuntimeError`` with the status RESOURCE_EXHAUSTED,
    ``MemoryError`` (including NumPy's and :class:`MemoryBudgetError`), and ``OSError`` with
    ``ENOMEM``. A compiler error about a kernel's shared memory has the same status but is excluded.

    Example:
        >>> import jaxkfac as jk
        >>> jk.memory.is_out_of_memory(MemoryError()), jk.memory.is_out_of_memory(KeyError())
        (True, False)
    """
    return _root(error) is not None


def asked_bytes(error: BaseException) -> int | None:
    """The bytes that could not be allocated, read from the error; ``None`` if it does not say."""
    root = _root(error)
    if root is None:
        return None
    shape, dtype = getattr(root, "shape", None), getattr(root, "dtype", None)
    if isinstance(shape, tuple) and isinstance(dtype, np.dtype):  # NumPy's
        return math.prod(shape) * dtype.itemsize
    message = str(root)
    if exact := _COUNT.search(message):
        return int(exact[1])
    if rounded := _REPORTED_SIZE.search(message):
        return round(float(rounded[1]) * _REPORTED_UNITS[rounded[2]])
    return None


def explain_out_of_memory(error: BaseException) -> str:
    """Explain what could not be allocated, what is free, and what to try first.

    Call it while handling the error: memory held by the failed step then still counts as used.

    Args:
        error: An error for which :func:`is_out_of_memory` is true.

    Returns:
        A paragraph.

    Raises:
        ValueError: it is another kind of error.

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
    """The first half of :func:`explain_out_of_memory`: bytes requested, and bytes free."""
    if not is_out_of_memory(error):
        raise ValueError(f"expected an error that says that memory ran out, got {error!r}")
    requested = asked_bytes(error)
    requested_text = "" if requested is None else f": {bytes_text(requested)} were asked for"
    places = [_state(device) for device in _counting()] or [_host()]
    return f"out of memory{requested_text}; {'; '.join(places)}"


def _root(error: BaseException | None) -> BaseException | None:
    """The error in the chain of causes that itself says memory ran out."""
    while error is not None:
        if isinstance(error, MemoryError):
            return error
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            return error
        message = str(error)
        # JaxRuntimeError is a RuntimeError; a backend that fails to start raises a plain one.
        if (
            isinstance(error, RuntimeError)
            and _MARKS.search(message)
            and not _SHARED.search(message)
        ):
            return error
        error = error.__cause__
    return None


def _counting() -> list[Any]:
    """Devices whose allocator reports a limit."""
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
    free, resident = free_host_bytes(), resident_bytes()
    free_text = "an unknown number of bytes are" if free is None else f"{bytes_text(free)} are"
    resident_text = "" if resident is None else f", and this process holds {bytes_text(resident)}"
    return f"in main memory {free_text} free{resident_text}"
