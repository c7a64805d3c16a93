"""Timeline of a training with HostCurvature: what overlaps what, and how fast factors leave.

Run: python -m benchmarks.overlap [--steps 40] [--json FILE], with OPENBLAS_NUM_THREADS=1

The scanned transformer of benchmarks.factors trains, its loss read at every step; a service takes
the factors in and decomposes them every ten steps, with lag five. Three lanes are recorded:
``step`` (from dispatch until the loss is there), ``average`` (what remains of a copy once its
array is computed, and the addition) and ``decompose`` (one matrix on the host). Printed are

- the lanes, drawn over time;
- ``hidden_share``: of the time in which something was decomposed, how much a step was in work;
- ``step_ratio``: median step beside a decomposition over median step without one. On the CPU both
  share the cores; on an accelerator the aim is 1;
- ``bandwidth``: GB/s from device to host memory by size of the array, the best of five copies. On
  the CPU nothing crosses a bus, and the figure is not one of transfers.

True peaks against planned ones are printed by ``benchmarks.memory``.
"""

import argparse
import statistics
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxkfac as jk
from benchmarks._record import shown, stamp, write
from benchmarks.factors import cases
from jaxkfac.curvature.host import _decompose, _push

LANES = ("step", "average", "decompose")
COLUMNS = 100
MIB = 2**20


class Interval(NamedTuple):
    """Something in work; seconds since the recording began."""

    lane: str
    start: float
    end: float


class Recorder:
    """Intervals of several threads; while it is entered, the service's work is recorded."""

    def __init__(self) -> None:
        self.intervals: list[Interval] = []
        self._lock, self._zero = threading.Lock(), time.perf_counter()

    def timed(self, lane: str, fn: Any) -> Any:
        """``fn``, each call recorded."""

        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter() - self._zero
            try:
                return fn(*args, **kwargs)
            finally:
                with self._lock:
                    end = time.perf_counter() - self._zero
                    self.intervals.append(Interval(lane, start, end))

        return call

    def __enter__(self) -> "Recorder":
        self._solve, self._average = _decompose.eigh_on_host, _push.Copy.__call__
        _decompose.eigh_on_host = self.timed("decompose", self._solve)
        timed = self.timed("average", self._average)

        def average(copy: Any) -> None:
            jax.block_until_ready((copy.sums, copy.count))
            timed(copy)

        _push.Copy.__call__ = average
        return self

    def __exit__(self, *_: Any) -> None:
        _decompose.eigh_on_host, _push.Copy.__call__ = self._solve, self._average

    def of(self, lane: str) -> list[Interval]:
        return [i for i in self.intervals if i.lane == lane]


def train(steps: int) -> Recorder:
    """The recorded steps; compilation and the first hand-over come before them."""
    objective, params, batch = cases()["scanned"]
    stats = jax.jit(jk.value_grad_and_factors(objective))
    like = jax.eval_shape(stats, params, batch).factors
    every = 10
    with (
        jk.HostCurvature(refresh_every=every, lag=5, initial="identity", like=like) as service,
        Recorder() as recorder,
    ):

        def one(step: int) -> None:
            out = stats(params, batch)
            service.push(out.factors, step)
            service.bases(step)
            jax.block_until_ready(out.value)

        for step in range(2 * every):
            one(step)
        service.flush()
        recorder.intervals.clear()
        recorded = recorder.timed("step", one)
        for step in range(2 * every, 2 * every + steps):
            recorded(step)
    return recorder


def shared(interval: Interval, others: list[Interval]) -> float:
    """Seconds of an interval in which one of the others, which do not overlap, was in work."""
    return sum(max(0.0, min(interval.end, o.end) - max(interval.start, o.start)) for o in others)


def union(intervals: list[Interval]) -> list[Interval]:
    """The same time without overlaps: several workers decompose at once."""
    out: list[Interval] = []
    for i in sorted(intervals, key=lambda i: i.start):
        if out and i.start <= out[-1].end:
            out[-1] = out[-1]._replace(end=max(out[-1].end, i.end))
        else:
            out.append(i)
    return out


def overlap(recorder: Recorder) -> dict[str, Any]:
    """Figures of one recording."""
    steps, working = recorder.of("step"), union(recorder.of("decompose"))
    spans = [shared(i, steps) for i in working]
    lengths = [i.end - i.start for i in steps]
    beside = [n for n, i in zip(lengths, steps, strict=True) if shared(i, working) > 0]
    alone = [n for n, i in zip(lengths, steps, strict=True) if shared(i, working) == 0]
    return {
        "steps_beside_a_decomposition": len(beside),
        "steps_without": len(alone),
        "decomposing_s": sum(i.end - i.start for i in working),
        "hidden_share": sum(spans) / sum(i.end - i.start for i in working),
        "step_ratio": statistics.median(beside) / statistics.median(alone)
        if beside and alone
        else None,
    }


def drawn(recorder: Recorder) -> str:
    """One line a lane; a column is dark where the lane was in work for half of it or more."""
    first = min(i.start for i in recorder.intervals)
    last = max(i.end for i in recorder.intervals)
    width, lines = (last - first) / COLUMNS, []
    for lane in LANES:
        work = union(recorder.of(lane))
        bins = [Interval(lane, first + k * width, first + (k + 1) * width) for k in range(COLUMNS)]
        marks = [
            "█" if shared(b, work) >= width / 2 else "░" if shared(b, work) else " " for b in bins
        ]
        lines.append(f"{lane:>10} {''.join(marks)}")
    return "\n".join([*lines, f"{'':>10} {'0':<{COLUMNS - 8}}{last - first:6.2f} s"])


def bandwidth() -> dict[str, float]:
    """GB/s from the device to host memory, by MiB."""
    rates = {}
    for mib in (1, 16, 256):
        best = float("inf")
        for k in range(5):
            x = jax.block_until_ready(jnp.full((mib * MIB // 4,), k, jnp.float32))
            start = time.perf_counter()
            np.array(x)  # a copy on the CPU too, where np.asarray would be a view
            best = min(best, time.perf_counter() - start)
        rates[f"{mib}_mib"] = mib * MIB / best / 1e9
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="recorded steps (default 40)")
    parser.add_argument("--json", type=Path, help="write the record here")
    args = parser.parse_args()
    record = stamp(steps=args.steps)
    recorder = train(args.steps)
    print(drawn(recorder))
    record["overlap"], record["bandwidth_gb_per_s"] = overlap(recorder), bandwidth()
    shown("overlap", record["overlap"])
    shown("bandwidth_gb_per_s", record["bandwidth_gb_per_s"])
    record["intervals"] = [[i.lane, round(i.start, 5), round(i.end, 5)] for i in recorder.intervals]
    write(record, args.json)


if __name__ == "__main__":
    main()
