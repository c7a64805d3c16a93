"""Peaks of main memory and of every device, stage by stage."""

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
    """The most bytes held at once.

    Attributes:
        nbytes: Bytes.
        exact: ``False`` where a peak before this one was higher and hides it; the bytes are
            then the most that was seen at the ends of the stage, a lower bound.
    """

    nbytes: int
    exact: bool

    def __str__(self) -> str:
        return bytes_text(self.nbytes) if self.exact else f"≥ {bytes_text(self.nbytes)}"


@dataclasses.dataclass
class Stage:
    """What one ``track`` block measured; complete when the block has ended.

    Attributes:
        name: As given.
        stages: Blocks inside it, in order.
        seconds: Wall time.
        resident_before: Bytes of main memory when it began; ``None`` where unknown.
        resident_peak: The most during the block, these included. Files that the process has
            mapped count; memory that the C library keeps after a free counts too.
        device_before: ``{device: bytes in use}`` of devices that count.
        device_peaks: ``{device: Peak}`` of them; empty on the CPU.
    """

    name: str
    stages: list["Stage"] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    resident_before: int | None = None
    resident_peak: Peak | None = None
    device_before: dict[str, int] = dataclasses.field(default_factory=dict)
    device_peaks: dict[str, Peak] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, for JSON."""
        return dataclasses.asdict(self)

    def walk(self, depth: int = 0) -> Iterator[tuple[int, "Stage"]]:
        """This stage and all inside it, with their depth."""
        yield depth, self
        for stage in self.stages:
            yield from stage.walk(depth + 1)

    def table(self) -> list[list[str]]:
        """A row of words for this stage and each inside it, below a row of headings."""
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

    Main memory: on Linux the kernel's high-water mark (VmHWM), which is lowered at the start of
    the block so that the peak is the block's own; other readers of that mark in this process
    see the lowered one. Where lowering is not allowed the peak is exact only if it is the
    highest so far. Devices: ``memory_stats()`` keeps one peak for the life of the process, so
    there the latter always holds: measure a stage that matters in a process of its own.

    JAX returns before work is done: end the block with ``jax.block_until_ready``. glibc keeps
    small freed blocks, and then more and more of the large ones; start the process with
    ``MALLOC_MMAP_THRESHOLD_=1048576`` where peaks of parts of a program are compared.

    Args:
        name: Shown in the table.

    Yields:
        The :class:`Stage`, filled in at the end, also if the block fails. ``print`` shows it
        and the stages inside it as a table.

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
    """One open block's share of the process's only high-water mark."""

    def __init__(self) -> None:
        self.before = resident_bytes()
        self.mark_before = 0  # the highest mark that may not be the block's own
        self.highest = 0  # of marks read while it was open


class _Watches:
    """All open blocks: whoever lowers the mark first hands it to those that still need it."""

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
    """``{device: (bytes in use, their peak so far)}``."""
    found = {}
    for device in jax.local_devices():
        stats = device.memory_stats()
        if stats and "peak_bytes_in_use" in stats:
            found[str(device)] = (stats.get("bytes_in_use", 0), stats["peak_bytes_in_use"])
    return found


_CURRENT: ContextVar[Stage | None] = ContextVar("_CURRENT", default=None)
# Of the process, as is the mark that it shares out.
_WATCHES = _Watches()
