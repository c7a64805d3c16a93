"""Peak bytes of main memory and of every device, for each stage of a program."""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import jax

from jaxkfac._text import aligned
from jaxkfac.memory._budget import bytes_text, lower_mark, resident_bytes, resident_mark


@dataclasses.dataclass(frozen=True)
class Peak:
    """The largest number of bytes in use at once.

    Attributes:
        nbytes: Bytes.
        exact: ``False`` if an earlier, higher peak hides this one; ``nbytes`` is then the larger
            value at the ends of the stage, a lower bound.
    """

    nbytes: int
    exact: bool

    def __str__(self) -> str:
        return bytes_text(self.nbytes) if self.exact else f"≥ {bytes_text(self.nbytes)}"


@dataclasses.dataclass
class Stage:
    """Measurements of one ``track`` block; complete once the block has ended.

    Attributes:
        name: Name of the block.
        stages: Blocks inside it, in order.
        seconds: Wall time.
        resident_before: Bytes of main memory at its start; ``None`` if unknown.
        resident_peak: Largest value during the block, including that at its start. Mapped files
            count, and memory that the C library keeps after a free.
        device_before: ``{device: bytes in use}`` for devices that report them.
        device_peaks: ``{device: Peak}`` for these devices; empty on the CPU.
    """

    name: str
    stages: list["Stage"] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    resident_before: int | None = None
    resident_peak: Peak | None = None
    device_before: dict[str, int] = dataclasses.field(default_factory=dict)
    device_peaks: dict[str, Peak] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dataclasses.asdict(self)

    def walk(self, depth: int = 0) -> Iterator[tuple[int, "Stage"]]:
        """This stage and all stages inside it, with their depth."""
        yield depth, self
        for stage in self.stages:
            yield from stage.walk(depth + 1)

    def table(self) -> list[list[str]]:
        """Rows of text for this stage and each inside it, after a row of headings."""
        devices = list(self.device_peaks)
        rows = [["stage", "seconds", "resident before", "resident peak", *devices]]
        for depth, stage in self.walk():
            before = stage.resident_before
            rows.append(
                [
                    "\N{NO-BREAK SPACE}" * 2 * depth + stage.name,
                    f"{stage.seconds:.2f}",
                    "unknown" if before is None else bytes_text(before),
                    str(stage.resident_peak or "unknown"),
                    *(str(stage.device_peaks.get(name, "unknown")) for name in devices),
                ]
            )
        return rows

    def __str__(self) -> str:
        return "\n".join(aligned(self.table()))


@contextlib.contextmanager
def track(name: str) -> Iterator[Stage]:
    """Measure the peak bytes of a block, and of the blocks inside it.

    For main memory it reads the kernel's high-water mark (VmHWM, Linux), which it lowers at the
    start of the block so that the peak is that of the block; other readers of the mark in this
    process see the lowered value. If lowering is not allowed, the peak is exact only if it is the
    highest so far. Devices keep one peak for the life of the process (``memory_stats()``), so that
    restriction always holds for them: measure an important stage in its own process.

    JAX returns before work is done: end the block with ``jax.block_until_ready``. glibc keeps
    small freed blocks, and over time more of the large ones; start the process with
    ``MALLOC_MMAP_THRESHOLD_=1048576`` to compare peaks of parts of a program.

    Args:
        name: Name in the table.

    Yields:
        The :class:`Stage`, completed at the end even if the block fails. ``print`` shows it and
        the stages inside it as a table.

    Example:
        >>> import jax.numpy as jnp, jaxkfac as jk
        >>> with jk.memory.track("run") as run:
        ...     with jk.memory.track("load"):
        ...         x = jnp.ones((512, 512)).block_until_ready()
        >>> [stage.name for depth, stage in run.walk()], run.stages[0].seconds <= run.seconds
        (['run', 'load'], True)
    """
    stage = Stage(name)
    if (outer := _CURRENT.get()) is not None:
        outer.stages.append(stage)
    token = _CURRENT.set(stage)
    watch = _Watch()
    _WATCHES.open(watch)
    stage.resident_before = watch.before
    devices_before = _device_stats()
    stage.device_before = {device: used for device, (used, _) in devices_before.items()}
    start = time.perf_counter()
    try:
        yield stage
    finally:
        stage.seconds = time.perf_counter() - start
        stage.resident_peak = _WATCHES.close(watch)
        for device, (used, mark) in _device_stats().items():
            used_before, mark_before = devices_before.get(device, (0, 0))
            stage.device_peaks[device] = _peak(mark_before, mark, max(used_before, used))
        _CURRENT.reset(token)


class _Watch:
    """The state of one open block with respect to the process's only high-water mark."""

    def __init__(self) -> None:
        self.before = resident_bytes()
        self.mark_before = 0  # the highest mark that may stem from before the block
        self.highest = 0  # highest mark read while the block was open


class _Watches:
    """All open blocks; before the mark is lowered, its value is passed to all of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: list[_Watch] = []

    def open(self, watch: _Watch) -> None:
        with self._lock:
            mark = self._read()
            self._open.append(watch)
            watch.mark_before = 0 if lower_mark() else mark or 0

    def close(self, watch: _Watch) -> Peak | None:
        with self._lock:
            mark = self._read()
            self._open.remove(watch)
        now = resident_bytes()
        if mark is None or now is None or watch.before is None:
            return None
        return _peak(watch.mark_before, watch.highest, max(watch.before, now))

    def _read(self) -> int | None:
        mark = resident_mark()
        for watch in self._open:
            watch.highest = max(watch.highest, mark or 0)
        return mark


def _peak(mark_before: int, mark: int, at_ends: int) -> Peak:
    return Peak(max(mark, at_ends), True) if mark > mark_before else Peak(at_ends, False)


def _device_stats() -> dict[str, tuple[int, int]]:
    """``{device: (bytes in use, peak so far)}``."""
    stats_by_device = {}
    for device in jax.local_devices():
        stats = device.memory_stats()
        if stats and "peak_bytes_in_use" in stats:
            stats_by_device[str(device)] = (
                stats.get("bytes_in_use", 0),
                stats["peak_bytes_in_use"],
            )
    return stats_by_device


_CURRENT: ContextVar[Stage | None] = ContextVar("_CURRENT", default=None)
# One for the process, like the mark.
_WATCHES = _Watches()
