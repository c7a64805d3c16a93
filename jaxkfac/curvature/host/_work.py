"""One refresh in work: snapshots become spectra, slice by slice, on the workers."""

import threading
from collections.abc import Sequence

import numpy as np
from jaxtyping import Array

from jaxkfac._errors import NonFiniteFactorError
from jaxkfac.curvature._home import NOWHERE, Home, detached
from jaxkfac.curvature.host._average import Averages, Snapshot
from jaxkfac.curvature.host._decompose import Decomposer, failure
from jaxkfac.curvature.host._layout import Block, Place
from jaxkfac.curvature.host._monitor import Monitor
from jaxkfac.curvature.host._store import Store
from jaxkfac.curvature.host._threads import Lane
from jaxkfac.linalg import HostSpectrum


class Work:
    """The blocks of one refresh.

    A stacked factor is decomposed one slice at a time, so that a worker needs room for the
    matrix, the copy that LAPACK overwrites and its scratch: four matrices. A snapshot is
    freed as soon as its last slice is done. The results do not depend on which worker does
    what, or when.

    Args:
        blocks: What to decompose.
        homes: Of the factors.
        previous: Eigenvectors that may be kept; on the host from their first use on.
        decomposer: What does it.
        store: Where results are allocated.
        monitor: What is told about progress.

    Attributes:
        results: ``{place: spectrum}``, and the mean of diagonal ones as values.
        failures: ``{place: error}``.
        done: Whether nothing is left to do.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        homes: dict[Place, Home],
        previous: dict[Place, Array | np.ndarray],
        decomposer: Decomposer,
        store: Store,
        monitor: Monitor,
    ) -> None:
        self._blocks, self._homes, self._previous = blocks, homes, previous
        self._decomposer, self._store, self._monitor = decomposer, store, monitor
        self.results: dict[Place, HostSpectrum] = {}
        self.failures: dict[Place, NonFiniteFactorError] = {}
        self.done = False
        self._lock = threading.Lock()
        self._partial: dict[Place, HostSpectrum] = {}
        self._failed: dict[Place, dict[tuple[int, ...], NonFiniteFactorError]] = {}
        self._left: dict[Place, int] = {}
        self._snapshots: dict[Place, Snapshot] = {}

    def begin(self, averages: Averages, age: int, workers: Lane) -> None:
        """Take the snapshots and queue the slices; runs between pushes, in their thread."""
        for block in self._blocks:
            entry = block.source
            if entry.place not in self._snapshots:
                self._snapshots[entry.place] = averages.snapshot(entry, age)
        jobs: list[tuple[Block, tuple[int, ...]]] = []
        for block in sorted(self._blocks, key=lambda b: b.size, reverse=True):
            indices = list(np.ndindex(block.source.stack))
            self._left[block.place] = len(indices)
            jobs += [(block, index) for index in indices]
        if not jobs:
            with self._monitor.changing():
                self.done = True
        for block, index in jobs:
            workers.put(lambda block=block, index=index: self._do(block, index))

    def _do(self, block: Block, index: tuple[int, ...]) -> None:
        try:
            spectrum = self._spectrum(block, index)
        except NonFiniteFactorError as error:
            with self._lock:
                self._failed.setdefault(block.place, {})[index] = error
        else:
            self._keep(block, index, spectrum)
        self._count(block)

    def _spectrum(self, block: Block, index: tuple[int, ...]) -> HostSpectrum:
        snapshot = self._snapshots[block.source.place]
        name = block.name + (f" at stack index {index}" if index else "")
        if snapshot.num_left_out:
            raise failure(block.name, snapshot.num_left_out)
        mean = snapshot.mean(index)
        if not block.source.dense:
            return HostSpectrum(mean[..., :-1] if block.without_ones else mean, None)
        if block.without_ones:
            mean = np.ascontiguousarray(mean[:-1, :-1])
        old = self._old_vectors(block.place)
        return self._decomposer.decompose(
            mean,
            name=name,
            device=self._homes.get(block.source.place, NOWHERE).device,
            previous=None if old is None else old[index],
        )

    def _old_vectors(self, place: Place) -> np.ndarray | None:
        """On the host: a stack is transferred once, not for each of its slices."""
        with self._lock:
            old = self._previous.get(place)
            if old is not None and not isinstance(old, np.ndarray):
                old = self._previous[place] = np.asarray(detached(old))
            return old

    def _keep(self, block: Block, index: tuple[int, ...], spectrum: HostSpectrum) -> None:
        if not index and self._store.budget is None:  # no copy
            self._partial[block.place] = spectrum
            return
        with self._lock:
            whole = self._partial.get(block.place)
            if whole is None:
                whole = self._partial[block.place] = self._allocate(block, spectrum)
        whole.values[index] = spectrum.values
        if whole.vectors is not None:
            whole.vectors[index] = spectrum.vectors

    def _allocate(self, block: Block, like: HostSpectrum) -> HostSpectrum:
        stack, what = block.source.stack, f"the basis of {block.name}"
        values, vectors = (
            None if x is None else self._store.empty((*stack, *x.shape), x.dtype, what)
            for x in like
        )
        assert values is not None
        return HostSpectrum(values, vectors)

    def _count(self, block: Block) -> None:
        with self._lock:
            self._left[block.place] -= 1
            if self._left[block.place]:
                return
            del self._left[block.place]
            whole = self._partial.pop(block.place, None)
            if block.place in self._failed:
                errors = self._failed.pop(block.place)
                self.failures[block.place] = errors[min(errors)]
            elif whole is not None:
                self.results[block.place] = whole
            source = block.source.place
            if not any(b.source.place == source and b.place in self._left for b in self._blocks):
                del self._snapshots[source]
            self._previous.pop(block.place, None)
            done = not self._left
        if done:
            with self._monitor.changing():
                self.done = True
