"""Running averages in host memory: sums and counts, with symmetric sums folded in half."""

import dataclasses
import math
import warnings
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxkfac.blocks import PLAIN_TERMS, Entry, Factors, Layout, Place, Side, Sides
from jaxkfac.curvature.host._store import Storage, Store
from jaxkfac.linalg import pack, packed_shape, unpack

_PIECE = 1 << 18  # elements checked at once


def outgrows_single(decay: float, contributions: int) -> bool:
    """Whether float32 sums move to float64, with this many contributions at each step."""
    return contributions > PLAIN_TERMS * (1 - decay)


class Snapshot(NamedTuple):
    """The sums and counts of one entry at one step.

    Attributes:
        entry: The entry.
        sums: As stored: a stack of folded triangles, or of vectors.
        count: ``(stack...)`` or its leading axes.
        dtype: The dtype of the arithmetic and of the mean.
        num_left_out: How many contributions were left out since the previous snapshot, if no other
            contribution has been added since then; else 0.
    """

    entry: Entry
    sums: np.ndarray
    count: np.ndarray
    dtype: np.dtype
    num_left_out: int

    def total(self, index: tuple[int, ...]) -> np.ndarray:
        """The sum of one stacked slice, unfolded."""
        stored = self.sums[(*index, ...)].astype(self.dtype, copy=False)
        return unpack(stored, self.entry.size) if self.entry.dense else stored

    def full_array(self) -> np.ndarray:
        """The sums of all slices, unfolded."""
        slices = [np.asarray(self.total(index)) for index in np.ndindex(self.entry.stack)]
        return np.stack(slices).reshape(*self.entry.stack, *slices[0].shape)

    def mean(self, index: tuple[int, ...]) -> np.ndarray:
        """The mean of one stacked slice; an empty count gives 0, as in :class:`Factors`."""
        count = self.count[index[: self.count.ndim]]
        return np.asarray(self.total(index) / np.where(count > 0, count, 1).astype(self.dtype))


@dataclasses.dataclass
class Running:
    """The average of one entry.

    Attributes:
        sums: As in :class:`Snapshot`.
        count: As in :class:`Snapshot`.
        dtype: As in :class:`Snapshot`.
        age: How many steps it has seen. Decay is applied when the average is next touched.
        idle: Whether only contributions with a count of zero have come at step ``age``; the average
            does not decay for them.
        num_added: Finite contributions since the last snapshot, or since the sums overflowed.
        num_left_out: Contributions since the last snapshot that were not finite, or whose sum
            with the average was not.
        weight: Number of contributions in the sums; each counts one when added, and decays with
            them.
        stays_single: Whether there was no memory for sums in double precision.
    """

    sums: np.ndarray
    count: np.ndarray
    dtype: np.dtype
    age: int
    idle: bool = False
    num_added: int = 0
    num_left_out: int = 0
    weight: float = 0.0
    stays_single: bool = False

    @property
    def work_dtype(self) -> np.dtype:
        """The dtype of the arithmetic: that of the sums, with at least the bits of ``dtype``."""
        return self.sums.dtype if self.sums.itemsize > self.dtype.itemsize else self.dtype


class Averages:
    r"""The averages of all entries, advanced like :func:`jaxkfac.update_average`.

    Each contribution is added when it comes, $\beta (\beta S_{t-2} + \Sigma_{t-1}) + \Sigma_t'
    + \Sigma_t'' \ldots$, in the dtype of the factors and in the order of the pushes. With one
    push for each step this equals ``update_average`` bit by bit. Several pushes of one step are
    added to the average rather than to each other, which differs by rounding.

    float32 sums of more than 256 contributions (of one step, or with a decay near 1) are moved to
    float64, so that 200,000 contributions are accurate to 1e-5. That takes twice the bytes. If the
    store has no memory for them, they stay in float32, with a warning.

    Args:
        layout: The entries to average.
        decay: $\beta$.
        storage: ``"bfloat16"`` rounds the stored sums after each push; the arithmetic is
            unchanged. With $u = 2^{-8}$, ``r`` roundings for each step (one for each push, one more
            if pushes hold some of the iterations) and $|S_{ij}|$ the largest sum so far,
            each element is off by at most $r u |S_{ij}| / (1 - \beta)$: 8% for $r = 1$ and
            $\beta = 0.95$; about $u / \sqrt{1 - \beta^2}$, 1%, if roundings are independent.
        store: Where arrays are allocated.
    """

    def __init__(self, layout: Layout, decay: float, storage: Storage, store: Store) -> None:
        self.layout, self._decay, self._storage, self._store = layout, decay, storage, store
        self.running: dict[Place, Running] = {}
        self.left_out: dict[str, int] = {}
        self._triangle = np.empty(0, np.uint8)

    def hold(self, place: Place, running: Running) -> None:
        """Continue an average; the buffer for folding has the size of the largest slice."""
        self.running[place] = running
        if (entry := self.layout.entries[place]).dense:
            nbytes = running.dtype.itemsize * math.prod(packed_shape(entry.size))
            if nbytes > self._triangle.size:
                self._triangle = np.empty(nbytes, np.uint8)

    def add(self, entry: Entry, value: np.ndarray, count: np.ndarray, first: int, age: int) -> None:
        """Add one contribution, or count it as left out if it is not finite.

        Sums that overflow would stay infinite, so they start again from zero, and the contribution
        is left out.

        Args:
            entry: The entry it belongs to.
            value: Sums, or those of the iterations from ``first`` on, along the leading stacked
                axis.
            count: Their counts, one for all or along the stack.
            first: See ``value``.
            age: The number of its step among the steps that were pushed.
        """
        if entry.place not in self.running:
            self.hold(entry.place, self._new(entry, value, count, age))
        running = self.running[entry.place]
        # Left out before anything is changed: a NaN in an average stays there for good.
        if not (_is_finite(count) and _is_finite(value)):
            self._leave_out(running, entry)
            return
        # Sums over no rows are no data. Decaying for them would keep the mean, but the next data of
        # a layer that is rarely read would outweigh all of its history.
        if not count.any():
            self._stay(running, age)
            return
        running.num_added += 1
        rows = ... if not entry.stack else slice(first, first + len(value))
        if entry.stack and len(value) < entry.stack[0]:
            # All iterations of a stack have one age, so those that are pushed later must have
            # decayed as well.
            self._catch_up(running, age, new=True)
        decays = _decays(running, age)
        running.age, running.idle = age, False
        running.weight = running.weight * self._decay**decays + 1
        if running.weight > PLAIN_TERMS:
            self._widen(running, entry)
        decay = np.asarray(self._decay, running.work_dtype)
        for _ in range(decays):
            running.count *= decay
        running.count[rows] += count.astype(running.dtype, copy=False)
        axes = len(entry.stack)
        sums = running.sums[rows]
        # One loop over the slices of all stacked axes, which writes into the average itself.
        sums = sums.reshape(-1, *sums.shape[axes:])  # a view, since it is contiguous
        slices = value.reshape(-1, *value.shape[axes:])
        if entry.dense:
            triangle = self._triangle[: running.dtype.itemsize * math.prod(sums.shape[1:])]
            triangle = triangle.view(running.dtype).reshape(sums.shape[1:])
        overflows: list[str] = []  # the processor's flag reports them, so sums are not read again
        with np.errstate(over="call", call=lambda kind, _: overflows.append(kind)):
            for i in range(len(slices)):
                new = slices[i, ...]
                if entry.dense and new.shape != triangle.shape:  # else it has the average's layout
                    new = pack(new, triangle)
                _advance(sums[i, ...], decay, decays, new.astype(running.dtype, copy=False))
        rounded = sums.itemsize < running.dtype.itemsize  # no flag reports overflow in rounding
        if overflows or (rounded and not _is_finite(sums)):
            # An infinite sum never becomes finite again by decay, so the average starts anew from
            # the next contribution.
            running.sums[...] = running.count[...] = running.num_added = 0
            running.weight = 0.0
            self._leave_out(running, entry)

    def _widen(self, running: Running, entry: Entry) -> None:
        """Move the sums to double precision, if there is memory."""
        if running.sums.dtype != np.float32 or running.stays_single:
            return
        what = f"the average of {entry.name} in float64"
        try:
            sums = self._store.empty(running.sums.shape, np.dtype(np.float64), what)
        except (MemoryError, OSError) as error:
            running.stays_single = True
            warnings.warn(
                f"the average of {entry.name} stays in float32, and may lose "
                f"2**-25 of itself with each contribution: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        sums[...] = running.sums
        # The count has as many contributions as the sums, and loses the same digits.
        running.sums, running.count = sums, running.count.astype(np.float64)

    def _leave_out(self, running: Running, entry: Entry) -> None:
        running.num_left_out += 1
        self.left_out[entry.name] = self.left_out.get(entry.name, 0) + 1

    def _new(self, entry: Entry, value: np.ndarray, count: np.ndarray, age: int) -> Running:
        dtype = np.dtype(np.float64 if value.dtype == np.float64 else np.float32)
        stored = np.dtype(jnp.bfloat16) if self._storage == "bfloat16" else dtype
        side = packed_shape(entry.size) if entry.dense else value.shape[len(entry.stack) :]
        sums = self._store.zeros((*entry.stack, *side), stored, f"the average of {entry.name}")
        # With one count for all, iterations may still be pushed apart, so there is one for each of
        # the leading axis.
        along = entry.stack if count.ndim else entry.stack[:1]
        return Running(sums, np.zeros(along, dtype), dtype, age)

    def _stay(self, running: Running, age: int) -> None:
        """Record an empty step: the average does not decay unless data for it still comes."""
        if age > running.age:
            # Up to the step before: whether this one decays the average depends on whether data
            # comes later in it.
            self._catch_up(running, age - 1)
            running.age, running.idle = age, True

    def _catch_up(self, running: Running, age: int, *, new: bool = False) -> None:
        """Apply the decay of the steps up to ``age``; that of an idle step only for new data."""
        decay, decays = np.asarray(self._decay, running.work_dtype), age - running.age
        if new:
            decays = _decays(running, age)
        running.weight *= self._decay**decays
        for _ in range(decays):
            running.count *= decay
        # Slice by slice, because sums in bfloat16 are widened for the arithmetic.
        for slice_sums in running.sums if running.sums.ndim > 1 else [running.sums]:
            _advance(slice_sums, decay, decays, None)
        running.age, running.idle = age, running.idle and age == running.age and not new

    def snapshot(self, entry: Entry, age: int) -> Snapshot:
        """Copy one entry at ``age``, and restart its counts of contributions."""
        running = self.running[entry.place]
        self._catch_up(running, age)
        what = f"the snapshot of {entry.name}"
        # A snapshot only feeds a decomposition; sums that were widened for accuracy need no second
        # copy of that size.
        stored = min(running.sums.dtype, running.dtype, key=lambda dtype: dtype.itemsize)
        sums = self._store.empty(running.sums.shape, stored, what)
        sums[...] = running.sums
        # Only an average to which nothing else was added makes the refresh fail.
        left_out = 0 if running.num_added else running.num_left_out
        running.num_added = running.num_left_out = 0
        return Snapshot(entry, sums, running.count.astype(running.dtype), running.dtype, left_out)

    def view(self, entry: Entry, age: int) -> Snapshot:
        """One entry at ``age`` without a copy; the next contribution changes it."""
        running = self.running[entry.place]
        self._catch_up(running, age)
        count = running.count.astype(running.dtype, copy=False)
        return Snapshot(entry, running.sums, count, running.dtype, 0)

    def factors(self, age: int) -> Factors:
        """The average at ``age`` as factors of NumPy arrays.

        Sums over fewer loss terms than others, because contributions were left out or not pushed,
        are scaled to the largest number of terms. The mean stays that of the averaged data.

        Raises:
            ValueError: an array has never been pushed, or all its contributions were left out.
        """
        sides: Sides = {}
        for place, entry in self.layout.entries.items():
            if place not in self.running:
                raise ValueError(f"average: {entry.name} has never been pushed")
            current = self.view(entry, age)
            left_out = self.left_out.get(entry.name, 0)
            if left_out and not current.count.any():
                raise ValueError(
                    f"average: {entry.name} has no contribution; {left_out} were left out, "
                    f"because they were not finite or made it overflow"
                )
            count = current.count
            if place.table == "a":
                count = np.broadcast_to(count, entry.stack).copy()
            sides[place] = Side(current.full_array(), count)
        # `Factors` has one number of loss terms for all layers, while each entry of an average has
        # its own.
        outputs = [side for place, side in sides.items() if place.table != "a"]
        terms = max(side.count.max() for side in outputs)
        for side in outputs:
            _scale(side.data, side.count, terms)
        layers, bias = self.layout.layers, self.layout.bias
        return Factors.of_sides(sides, terms=terms, layers=layers, bias=bias)


def _is_finite(array: np.ndarray) -> bool:
    """Whether every element is finite; checked in pieces, because a full mask would be large."""
    flat = array.reshape(-1)
    for start in range(0, len(flat), _PIECE):
        if not np.isfinite(flat[start : start + _PIECE]).all():
            return False
    return True


def _decays(running: Running, age: int) -> int:
    """How often an average decays before new data of the step ``age`` is added."""
    # A further contribution of one step does not decay, unless the step has only had empty ones so
    # far.
    return age - running.age if age > running.age else int(running.idle)


def _advance(sums: np.ndarray, decay: np.ndarray, decays: int, new: np.ndarray | None) -> None:
    """``decay ** decays * sums + new`` in place, rounded to the stored dtype once."""
    work = sums if sums.dtype == decay.dtype else sums.astype(decay.dtype)
    for _ in range(decays):
        np.multiply(work, decay, out=work)
    if new is not None:
        np.add(work, new, out=work)
    if work is not sums:
        sums[...] = work


def _scale(sums: np.ndarray, count: np.ndarray, terms: np.generic) -> None:
    """Rescale ``sums`` over ``count`` loss terms to ``terms`` with the same mean, in place."""
    for index in np.ndindex(count.shape):
        if 0 < count[index] < terms:
            sums[index] *= (terms / count[index]).astype(sums.dtype)
