"""What is free, and the question asked before a large allocation."""

from pathlib import Path
from typing import Any, Literal

from jaxkfac._errors import JaxkfacError
from jaxkfac.memory._resident import address_space_bytes
from jaxkfac.memory._units import ByteSize, parse_bytes

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


class MemoryBudgetError(JaxkfacError, MemoryError):
    """An allocation would not fit; raised before it is tried."""


def free_bytes(device: Any) -> int | None:
    """Bytes that an accelerator's allocator can still hand out.

    Args:
        device: A ``jax.Device``.

    Returns:
        The allocator's limit less what is in use, in bytes; fragments count as free. ``None``
        where no such count is kept, as on the CPU: see :func:`free_host_bytes`.
    """
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return max(stats["bytes_limit"] - stats.get("bytes_in_use", 0), 0)


def free_host_bytes() -> int | None:
    """Bytes of main memory that this process can still take without swapping.

    The kernel's estimate, or what a container's limit or the process's own (``ulimit -v``)
    leaves if that is less. Files in the page cache count as free, because they give way.

    Returns:
        Bytes; ``None`` where the system does not say (it is Linux that does).
    """
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    found = [int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable:")]
    if not found:
        return None
    limits = [x for x in (_container_bytes(), _process_bytes()) if x is not None]
    return min([found[0], *limits])


def require(
    nbytes: ByteSize,
    *,
    device: Any,
    what: str,
    otherwise: Literal["raise", "host"] = "raise",
    fraction: float = 1.0,
    instead: str = "ask for less, or free arrays first (jk.memory.duplicate_report() finds some)",
) -> Literal["device", "host"]:
    """Ask for room before a large allocation: answer where it goes, or raise with the numbers.

    Nothing is reserved. An unknown limit is no limit.

    Args:
        nbytes: What will be allocated at once, in bytes or as ``"2GB"``.
        device: The ``jax.Device`` where it is wanted. On the CPU the question is about main memory.
        what: Names the allocation in the error.
        otherwise: Where ``device`` has no room: ``"host"`` answers so, if main memory has;
            ``"raise"`` does not ask there.
        fraction: Of the free memory that may be taken, in (0, 1]; the rest is for
            fragmentation and for what runs beside it.
        instead: What the error says to do.

    Returns:
        ``"device"`` or ``"host"``.

    Raises:
        MemoryBudgetError: with what is needed and what is free.

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
    asked = [f"{bytes_text(free)} are free there"]
    if otherwise == "host" and not on_cpu:
        host = free_host_bytes()
        if host is None or needed <= fraction * host:
            return "host"
        asked.append(f"{bytes_text(host)} are free in main memory")
    if fraction < 1:
        asked.append(f"of which {fraction:.0%} may be taken")
    raise MemoryBudgetError(
        f"{what} needs {bytes_text(needed)} on {device}; {', '.join(asked)}: {instead}"
    )


def bytes_text(nbytes: int | float) -> str:
    """Three digits and a binary unit."""
    for unit in ("B", "KiB", "MiB"):
        if abs(nbytes) < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.3g} GiB"


def _container_bytes() -> int | None:
    """What the process's memory cgroup leaves, if it has a limit."""
    for limit, usage in (
        ("memory.max", "memory.current"),  # version 2
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),  # version 1
    ):
        try:
            most = (_CGROUP / limit).read_text().strip()
            used = int((_CGROUP / usage).read_text())
            stat = (_CGROUP / usage).with_name("memory.stat").read_text().splitlines()
        except (OSError, ValueError):
            continue
        if not most.isdigit():  # "max"
            return None
        cache = sum(int(x.split()[1]) for x in stat if x.startswith("inactive_file "))
        return max(int(most) - used + cache, 0)
    return None


def _process_bytes() -> int | None:
    """What the process's limit on its address space leaves, if it has one."""
    used = address_space_bytes()
    if used is None:  # not Linux: there the module below may be missing
        return None
    import resource

    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if most == resource.RLIM_INFINITY else max(most - used, 0)
