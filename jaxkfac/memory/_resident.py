"""What the kernel knows about this process's main memory."""

import contextlib
import re
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
# The kernel adds up pages by thread, and both numbers are a little behind.
_SLACK = 4 << 20


def resident_bytes() -> int | None:
    """Bytes of main memory that belong to the process now; ``None`` but on Linux."""
    return _field("VmRSS")


def address_space_bytes() -> int | None:
    """Bytes of addresses that the process has mapped; ``None`` but on Linux."""
    return _field("VmSize")


def resident_mark() -> int | None:
    """The most they ever were, or were since :func:`lower_mark`."""
    return _field("VmHWM")


def lower_mark() -> bool:
    """Set the mark to what is resident now; ``False`` where that is not allowed.

    The mark belongs to the process: everything that reads it sees the lower one.
    """
    with contextlib.suppress(OSError):
        _CLEAR.write_text("5")
        mark, now = resident_mark(), resident_bytes()
        # A sandboxed kernel may accept the write and do nothing.
        return mark is not None and now is not None and mark <= now + _SLACK
    return False


def _field(name: str) -> int | None:
    try:
        found = re.search(rf"^{name}:\s*(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None
