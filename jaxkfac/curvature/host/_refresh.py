"""A refresh: workers turn snapshots into spectra, which become the bases in use."""

import contextlib
import dataclasses
import functools
import threading
import warnings
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxkfac._errors import NonFiniteFactorError
from jaxkfac.blocks import EigenBlock, Factors, Layout, Origin, Place
from jaxkfac.curvature._eigenbases import Eigenbases, identity_bases
from jaxkfac.curvature._placement import UNCOMMITTED, ResultSharding, put_result
from jaxkfac.curvature.host._average import Averages, Snapshot
from jaxkfac.curvature.host._decompose import Decomposer, Shares, failure
from jaxkfac.curvature.host._options import HostOptions
from jaxkfac.curvature.host._store import Store
from jaxkfac.curvature.host._threads import Job, Monitor, Workers
from jaxkfac.linalg.spectral import HostSpectrum, Spectrum
from jaxkfac.memory import whole_here


@dataclasses.dataclass(eq=False)
class Decompositions:
    """The blocks of one refresh.

    A stacked factor is decomposed one slice at a time, so that a worker needs memory for one
    matrix, the copy that LAPACK overwrites, and its scratch. A snapshot is freed as soon as its
    last slice is done. The results do not depend on which worker handles which slice, or when.

    Attributes:
        blocks: What to decompose.
        shardings: Where the results go.
        previous: Eigenvectors that may be kept; they move to the host when they are first used.
        decomposer: Decomposes the matrices.
        store: Where results are allocated.
        monitor: Is notified of progress.
        results: ``{place: spectrum}``; for a diagonal, its mean as values.
        failures: ``{place: error}``.
        done: Whether this process has finished its share.
    """

    blocks: Sequence[EigenBlock]
    shardings: dict[Place, ResultSharding]
    previous: dict[Place, Array | np.ndarray]
    decomposer: Decomposer
    store: Store
    monitor: Monitor
    results: dict[Place, HostSpectrum] = dataclasses.field(default_factory=dict)
    failures: dict[Place, NonFiniteFactorError] = dataclasses.field(default_factory=dict)
    done: bool = False
    _beginning: Job | None = None
    _exchanged: bool = False
    _dtypes: dict[Place, np.dtype] = dataclasses.field(default_factory=dict)
    _lock: contextlib.AbstractContextManager[Any] = dataclasses.field(
        default_factory=threading.Lock
    )
    _partial: dict[Place, HostSpectrum] = dataclasses.field(default_factory=dict)
    _failed: dict[Place, dict[tuple[int, ...], NonFiniteFactorError]] = dataclasses.field(
        default_factory=dict
    )
    _remaining: dict[Place, int] = dataclasses.field(default_factory=dict)
    _snapshots: dict[Place, Snapshot] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def shares(self) -> Shares:
        """How it is divided among processes; first computed outside the training loop."""
        return Shares(self.blocks, self.shardings)

    def beginning(self, averages: Averages, age: int, workers: Workers) -> Job:
        """The job that takes the snapshots and queues the slices; always the same job."""
        if self._beginning is None:
            self._beginning = Job(functools.partial(self._begin, averages, age, workers))
        return self._beginning

    def _begin(self, averages: Averages, age: int, workers: Workers) -> None:
        """Take the snapshots; runs between pushes, in their thread."""
        for entry in (entry for block in self.blocks for entry in block.sources):
            # Two blocks may read one factor (with and without the column of ones); it is copied
            # once.
            if entry.place not in self._snapshots:
                self._snapshots[entry.place] = averages.snapshot(entry, age)
        jobs: list[tuple[EigenBlock, tuple[int, ...]]] = []
        # The largest first, so that no worker is left alone with a large block at the end.
        for block in sorted(self.blocks, key=lambda b: b.size, reverse=True):
            self._dtypes[block.place] = self._snapshots[block.source.place].dtype
            indices = self.shares.of_this_process(block)
            if indices:
                self._remaining[block.place] = len(indices)
            jobs += [(block, index) for index in indices]
        # In several processes a process only decomposes its share, and need not hold the other
        # snapshots.
        needed = {entry.place for block, _ in jobs for entry in block.sources}
        for source in self._snapshots.keys() - needed:
            del self._snapshots[source]
        # Without a job nothing else would report the end of this share.
        if not jobs:
            with self.monitor.changing():
                self.done = True
        for block, index in jobs:
            workers.put(Job(functools.partial(self._do, block, index)))

    def _do(self, block: EigenBlock, index: tuple[int, ...]) -> None:
        try:
            spectrum = self._spectrum(block, index)
        except NonFiniteFactorError as error:
            with self._lock:
                # Stored and not raised: an error in a worker ends the service, while a block that
                # failed may keep its previous basis (``hand_over``).
                self._failed.setdefault(block.place, {})[index] = error
        else:
            self._keep(block, index, spectrum)
        self._count(block)

    def _spectrum(self, block: EigenBlock, index: tuple[int, ...]) -> HostSpectrum:
        snapshots = {entry.place: self._snapshots[entry.place] for entry in block.sources}
        name = block.name + (f" at stack index {index}" if index else "")
        left_out = max(snapshot.num_left_out for snapshot in snapshots.values())
        if left_out:
            raise failure(block.name, left_out)
        mean = block.mean(lambda entry: snapshots[entry.place].mean(index))
        if not block.source.dense:
            return HostSpectrum(mean, None)
        mean = np.ascontiguousarray(mean)
        old = self._old_vectors(block.place)
        return self.decomposer.decompose(
            mean,
            name=name,
            device=self.shardings.get(block.source.place, UNCOMMITTED).device,
            previous=None if old is None else old[index].astype(mean.dtype, copy=False),
        )

    def _old_vectors(self, place: Place) -> np.ndarray | None:
        """The old eigenvectors on the host; a stack is transferred once, not for each slice."""
        with self._lock:
            old = self.previous.get(place)
            if old is not None and not isinstance(old, np.ndarray):
                old = self.previous[place] = np.asarray(whole_here(old))
            return old

    def _keep(self, block: EigenBlock, index: tuple[int, ...], spectrum: HostSpectrum) -> None:
        # Without a stack, a budget that counts bytes or shares to sum, the result needs no copy.
        if not index and self.store.budget is None and block not in self.shares:
            self._partial[block.place] = spectrum
            return
        with self._lock:
            partial = self._partial.get(block.place)
            if partial is None:
                shared = block in self.shares
                # Processes that share a block each write their slices into zeros, and the exchange
                # sums them.
                partial = self._zeros(block) if shared else self._allocate(block, spectrum)
                self._partial[block.place] = partial
        # Outside the lock: the copy of a large matrix takes long, and only one worker writes an
        # index.
        partial.values[index] = spectrum.values
        if partial.vectors is not None:
            partial.vectors[index] = spectrum.vectors

    def _allocate(self, block: EigenBlock, like: HostSpectrum) -> HostSpectrum:
        stack, what = block.source.stack, f"the basis of {block.name}"
        values, vectors = (
            None if x is None else self.store.empty((*stack, *x.shape), x.dtype, what) for x in like
        )
        assert values is not None
        return HostSpectrum(values, vectors)

    def _zeros(self, block: EigenBlock) -> HostSpectrum:
        """Zeros for a dense block that is divided among processes."""
        side, dtype = (*block.source.stack, block.size), self._dtypes[block.place]
        what = f"the basis of {block.name}"
        values = self.store.zeros(side, dtype, what)
        return HostSpectrum(values, self.store.zeros((*side, block.size), dtype, what))

    def exchange(self, doing: str, about: str, error: BaseException | None = None) -> None:
        """Get the results of the other processes; each process calls it when it is done.

        Raises:
            ProcessesDisagreeError: another process failed, or does something else.
            BaseException: ``error``, the failure of this process.
        """
        if not self._exchanged:
            results, failures = self.results, self.failures
            self.shares.exchange(doing, about, error, results, failures, self._zeros)
            self._exchanged = True

    def _count(self, block: EigenBlock) -> None:
        with self._lock:
            self._remaining[block.place] -= 1
            if self._remaining[block.place]:
                return
            del self._remaining[block.place]
            partial = self._partial.pop(block.place, None)
            if block.place in self._failed:
                errors = self._failed.pop(block.place)
                # The failure at the lowest index, whichever came first: messages must not depend on
                # timing.
                self.failures[block.place] = errors[min(errors)]
            elif partial is not None:
                self.results[block.place] = partial
            still_needed = {
                e.place for b in self.blocks if b.place in self._remaining for e in b.sources
            }
            for entry in block.sources:
                if entry.place not in still_needed:
                    self._snapshots.pop(entry.place, None)
            # Old eigenvectors are as large as the new ones, so each is dropped as soon as its
            # successor exists.
            self.previous.pop(block.place, None)
            done = not self._remaining
        if done:
            with self.monitor.changing():
                self.done = True


@dataclasses.dataclass(eq=False)
class ActiveBases:
    """The spectra in use.

    Attributes:
        options: The service's options: how bases are read, where and in which dtype eigenvectors
            are kept, how many of them, and how often in a row an old one may stay.
        store: Where eigenvectors are allocated that stay on the host rounded or truncated.
        tables: ``{place: spectrum, or the mean of a diagonal}``.
        rank_errors: ``{block name: relative error}`` caused by ``rank``.
        kept: ``{block name: number of refreshes in a row for which it was kept}``.
    """

    options: HostOptions
    store: Store
    tables: dict[Place, Any] = dataclasses.field(default_factory=dict)
    rank_errors: dict[str, float] = dataclasses.field(default_factory=dict)
    kept: dict[str, int] = dataclasses.field(default_factory=dict)
    _bases: Eigenbases | None = None

    @property
    def _in_host(self) -> bool:
        return self.options.bases_in == "host"

    @property
    def _clipping(self) -> dict[str, float]:
        return {"max_condition": self.options.max_condition, "floor": self.options.floor}

    def _stored_as(self, columns: int, dtype: DTypeLike) -> tuple[int, np.dtype]:
        """How many of so many eigenvectors are kept, and in which dtype."""
        kept_dtype = jnp.dtype(self.options.vectors_dtype or dtype)
        return min(self.options.rank or columns, columns), kept_dtype

    def bases(self, layout: Layout, origin: Origin | None) -> Eigenbases:
        """The bases; the same object until the next hand-over."""
        if self._bases is None:
            self._bases = Eigenbases.of_blocks(layout, self.tables, **self._clipping, origin=origin)
        return self._bases

    def take_identities(self, like: Factors) -> None:
        """Use identities until the first hand-over, in the memory and dtype of eigenvectors.

        On the host there is one identity for each size, whatever the number of factors.
        """
        eyes: dict[tuple[int, Any], np.ndarray] = {}

        def eye(size: int, dtype: DTypeLike) -> Any:
            columns, kept_dtype = self._stored_as(size, dtype)
            if not self._in_host:
                # The last columns, because eigenvalues are ascending and a rank keeps the leading
                # ones.
                return jnp.eye(size, dtype=kept_dtype)[:, size - columns :]
            if (size, kept_dtype) not in eyes:
                eyes[size, kept_dtype] = self.store.zeros(
                    (size, columns), kept_dtype, "the first bases"
                )
                np.fill_diagonal(eyes[size, kept_dtype][size - columns :], 1)
            return eyes[size, kept_dtype]

        self._bases = None
        bases = identity_bases(like, eye=eye, **self._clipping)
        self.tables |= {place: side.data for place, side in bases.sides.items()}

    def stored(
        self, vectors: np.ndarray, where: ResultSharding, name: str, *, counted: bool = True
    ) -> Any:
        """Convert eigenvectors to the memory, dtype and rank in which they are kept.

        Args:
            vectors: In host memory.
            where: The sharding of the result, if it goes to a device.
            name: Name of their block, for errors.
            counted: Whether they are allocated in the store already.
        """
        columns, dtype = self._stored_as(vectors.shape[-1], vectors.dtype)
        if counted and (dtype, columns) == (vectors.dtype, vectors.shape[-1]):
            return vectors if self._in_host else put_result(vectors, where)
        shape, leading = (*vectors.shape[:-1], columns), vectors[..., -columns:]
        if not self._in_host:
            return put_result(np.ascontiguousarray(leading.astype(dtype)), where)
        out = self.store.empty(shape, dtype, f"the basis of {name}")
        out[...] = leading
        return out

    def hand_over(
        self,
        results: dict[Place, HostSpectrum],
        failures: dict[Place, NonFiniteFactorError],
        shardings: dict[Place, ResultSharding],
        layout: Layout,
    ) -> None:
        """Replace spectra one by one, dropping each old one before its successor arrives.

        Both dictionaries are emptied. Old bases that the caller still holds stay alive.

        Raises:
            NonFiniteFactorError: a decomposition failed, and there is no basis to keep or it
                has been kept for too long.
        """
        for place, error in list(failures.items()):
            name = layout.blocks[place].name
            count = self.kept.get(name, 0) + 1
            # Failures first: if one of them raises, no spectrum has been replaced, and the old
            # bases are complete.
            if place not in self.tables or count > self.options.keep_previous:
                raise error
            self.kept[name] = count
            del failures[place]
            warnings.warn(
                f"{error}. The previous basis of {name} is kept, refresh {count} of at most "
                f"{self.options.keep_previous}",
                RuntimeWarning,
                stacklevel=4,  # the caller of ``HostCurvature.bases``
            )
        self._bases = None
        for place in list(results):
            block = layout.blocks[place]
            where = shardings.get(block.source.place, UNCOMMITTED)
            self.tables.pop(place, None)
            values, vectors = results[place]
            rank = self.options.rank
            if vectors is not None and rank is not None:
                values, self.rank_errors[block.name] = _with_mean_tail(values, rank)
            if place.table == "diagonals":
                self.tables[place] = put_result(values, where)
            else:
                columns = None if vectors is None else self.stored(vectors, where, block.name)
                self.tables[place] = Spectrum(put_result(values, where), columns)
            del results[place], values, vectors
            self.kept.pop(block.name, None)


def _with_mean_tail(values: np.ndarray, rank: int) -> tuple[np.ndarray, float]:
    """Replace the eigenvalues beyond a rank by their mean; also return the largest error.

    The mean keeps the trace. The error is relative, in the Frobenius norm of the factor; the
    largest over the slices is returned.
    """
    tail = values[..., : max(values.shape[-1] - rank, 0)]
    if not tail.size:
        return values, 0.0
    off = tail - tail.mean(-1, keepdims=True)
    norm = np.linalg.norm(values, axis=-1)
    errors = np.linalg.norm(off, axis=-1) / np.where(norm > 0, norm, 1)
    changed = values.copy()
    changed[..., : tail.shape[-1]] -= off
    return changed, float(errors.max())
