"""A push, which counts completely or not at all: prepare, commit by one assignment, send."""

import collections
import dataclasses
import functools
import operator
import weakref
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jaxkfac._errors import nearest
from jaxkfac.blocks import Entry, Factors, Layout, Origin, Place, Side
from jaxkfac.curvature._placement import result_sharding
from jaxkfac.curvature.host._average import Averages
from jaxkfac.curvature.host._options import Schedule, is_double
from jaxkfac.curvature.host._state import State
from jaxkfac.curvature.host._threads import Job, Workers
from jaxkfac.memory import whole_here

# ---------------- the arrays of a push


def arrays_of(factors: Factors, layout: Layout, first: int) -> list[tuple[Entry, Any, Any]]:
    """``(entry, sums, count)`` of all arrays of factors, which may cover some layers of a step.

    Args:
        factors: Factors of some of the layers; stacked ones may have some of the iterations.
        layout: The entries that are averaged.
        first: The first of these iterations.

    Raises:
        ValueError: naming the array that is unknown, traced, deleted or of another shape.
    """
    arrays_by_entry = []
    for place, side in factors.sides.items():
        entry = layout.entries.get(place)
        if entry is None:
            keys = [other.key for other in layout.entries if other.table == place.table]
            raise ValueError(
                f"push: {place.table} of {place.key!r} belongs to no layer; the nearest are "
                f"{nearest(place.key, keys)}"
            )
        _check(entry, side.data, first)
        arrays_by_entry.append((entry, side.data, side.count))
    return arrays_by_entry


def _check(entry: Entry, value: object, first: int) -> None:
    if isinstance(value, Tracer):
        raise ValueError(
            f"push: {entry.name} is traced; push outside of jit, scan and grad, with the factors "
            "that the compiled function returned"
        )
    if not isinstance(value, jax.Array | np.ndarray):
        raise ValueError(f"push: {entry.name} is no array but {type(value).__name__}")
    # JAX's own error would come from the start of the copy, without the layer's name, when the push
    # may already have changed the service.
    if isinstance(value, jax.Array) and value.is_deleted():
        raise ValueError(
            f"push: {entry.name} has been deleted or donated; push factors before they are "
            "donated to another function"
        )
    is_matrix, expected = entry.dense and value.ndim >= 2, entry.shape
    shape = Side(value, is_matrix=is_matrix).full_shape
    if expected is None:
        if value.size != entry.size:
            raise ValueError(f"push: {entry.name} has {value.size} elements, not {entry.size}")
        return
    # A pass under a budget pushes some iterations of a scan; they are added at their place.
    if entry.stack and len(shape) == len(expected):
        last = first + shape[0]
        if shape[1:] == expected[1:] and 0 <= first < last <= expected[0]:
            return
        if shape[1:] == expected[1:]:
            raise ValueError(
                f"push: {entry.name} has iterations {first} to {last}, of {expected[0]}"
            )
    if shape != expected:
        raise ValueError(f"push: {entry.name} has shape {shape}, expected {expected}")


def start_copy(x: Any) -> Any:
    """Start the copy of ``x`` to the host, without waiting for it.

    A NumPy array that may still be written is copied at once. If an array lies on devices of
    several processes, these first exchange its shards.
    """
    if isinstance(x, jax.Array):
        x = whole_here(x)
        x.copy_to_host_async()
        return x
    return x if isinstance(x, np.ndarray) and not _may_change(x) else np.array(x)


def _may_change(x: np.ndarray) -> bool:
    """Whether an array can still be written; a read-only view can, through what it is a view of."""
    base: Any = x
    while isinstance(base, np.ndarray):
        if base.flags.writeable:
            return True
        base = base.base
    return False


@dataclasses.dataclass
class Copy:
    """An array on its way into the average; later its copy, which :meth:`started` starts.

    Attributes:
        entry: The entry it belongs to.
        sums: The array; later the result of :func:`start_copy`.
        count: Its count; later the result of :func:`start_copy`.
        first: The first iteration in it.
        step: The step of the push, for errors.
        age: How many different steps had been pushed by then.
        donated: The array to delete afterwards, if any.
    """

    entry: Entry
    sums: Any
    count: Any
    first: int
    step: int
    age: int
    donated: jax.Array | None

    def started(self) -> "Copy":
        """This copy once it has been started."""
        sums = start_copy(self.sums)
        return dataclasses.replace(self, sums=sums, count=start_copy(self.count))

    def add_to(self, averages: Averages) -> None:
        """Wait for the copy, add it to the average, and delete a donated array."""
        try:
            sums, count = np.asarray(self.sums), np.asarray(self.count)
            averages.add(self.entry, sums, count, self.first, self.age)
            if self.donated is not None:
                # It is deleted only now: after an earlier exception the caller still has it.
                self.donated.delete()
        except BaseException as error:
            error.add_note(
                f"while HostCurvature averaged {self.entry.name} of step {self.step}; "
                "a pushed array must not be donated or deleted before flush()"
            )
            raise


def as_step(step: Any) -> int:
    """A step number as an int; JAX and NumPy integers are accepted.

    Raises:
        ValueError: it is negative, or no integer.
    """
    try:
        # `index` takes integers of Python, NumPy and JAX, and refuses 3.0, which `int` would
        # accept.
        number = operator.index(step)
    except TypeError:
        raise ValueError(f"step must be an integer, got {step!r}") from None
    if number < 0:
        raise ValueError(f"step must be zero or positive, got {number}")
    return number


# ---------------- a push


class Push:
    """Factors of one step on their way into the average.

    Until a service stores this object, :meth:`prepare` has changed nothing that a later call could
    see. From then on the factors belong to the step: :meth:`send` completes the push, and calling
    it again after an exception continues it. Every line of it may run twice.

    Factors that fit into the bytes in flight are copied before the service stores the push, so
    that a failed copy leaves the average unchanged. Larger ones are copied one array after the
    other, as memory becomes free; then only the copy of the first array is certain.

    Args:
        state: State of the service.
        averaging: The thread that adds to the average.
        factors: As for :meth:`HostCurvature.push`.
        step: As for :meth:`HostCurvature.push`.
        first_iteration: As for :meth:`HostCurvature.push`.
        donate: As for :meth:`HostCurvature.push`.

    Raises:
        ValueError: naming the array that cannot be pushed.
    """

    def __init__(
        self,
        state: State,
        averaging: Workers,
        factors: Factors,
        step: int,
        first_iteration: int,
        donate: bool,
    ) -> None:
        self._state, self._averaging, self._step = state, averaging, step
        self._first = first_iteration
        self._sent = False
        self._double = is_double(factors)
        self._layout: Layout = state.layout_with(factors)
        self._origin: Origin | None = state.origin
        if not state.pushed_places and not state.complete:
            self._origin = None if factors.origin is None else factors.origin.of_average()
        arrays = arrays_of(factors, self._layout, first_iteration)
        # Weak, so that a push that is never repeated does not keep a step's factors alive.
        self._arrays = {place: weakref.ref(sums) for place, sums in _sums(factors).items()}
        age = state.schedule.pushed_to(step).age
        # Before anything is copied: a budget that is too small is the caller's mistake, and must
        # not cost a step.
        state.check_budget(self._layout, double=self._double)
        self._places = {entry.place for entry, _, _ in arrays}
        self._shardings = {entry.place: result_sharding(sums) for entry, sums, _ in arrays}
        # An array that occurs several times is deleted after its last use.
        last_use = {id(sums): i for i, (_, sums, _) in enumerate(arrays)} if donate else {}
        donated = [
            sums if last_use.get(id(sums)) == i and isinstance(sums, jax.Array) else None
            for i, (_, sums, _) in enumerate(arrays)
        ]
        self._num_arrays = len(arrays)
        items = [
            Copy(*array, first_iteration, step, age, gone)
            for array, gone in zip(arrays, donated, strict=True)
        ]
        # All in one batch if they fit, so that either all or none of a step's factors arrive.
        fits = sum(item.sums.nbytes for item in items) <= state.options.in_flight_bytes
        batches = [items] if fits else [[item] for item in items]
        self._batches = collections.deque(_CopyBatch(batch) for batch in batches if batch)
        self._schedule: Schedule | None = None

    def is_of(self, factors: Factors, step: int, first_iteration: int) -> bool:
        """Whether this is the push of the same arrays at the same step."""
        other_sums = _sums(factors)
        return (step, first_iteration, other_sums.keys()) == (
            self._step,
            self._first,
            self._arrays.keys(),
        ) and all(self._arrays[place]() is sums for place, sums in other_sums.items())

    def prepare(self) -> None:
        """Start the copies: of all arrays, or of the first if they do not all fit."""
        # A loaded service does not know where its factors live, and a hand-over needs that.
        self._state.shardings |= self._shardings
        if self._batches:
            self._load(self._batches[0])

    def after(self, schedule: Schedule) -> None:
        """Advance the schedule past this push, once all its due actions are done."""
        self._schedule = schedule.pushed_to(self._step)

    def withdraw(self) -> None:
        """Return the bytes that a push has taken if no service has stored it."""
        for batch in self._batches:
            for key in batch.keys:
                self._averaging.give_back(key)

    def send(self) -> None:
        """Make the factors part of the step; do nothing if that is done already."""
        if self._sent:
            return
        state = self._state
        assert self._schedule is not None
        state.use_layout(self._layout, double=self._double)
        state.origin, state.schedule = self._origin, self._schedule
        state.pushed_places |= self._places
        while self._batches:
            batch = self._batches[0]
            try:
                self._load(batch)
            except TimeoutError as error:
                error.add_note(
                    f"{self._num_arrays - len(self._batches)} of the {self._num_arrays} arrays of "
                    f"the push at step {self._step} have been sent, and the next call to this "
                    "service sends the others; pushing them again goes on too, and counts none "
                    "twice"
                )
                raise
            except Exception as error:
                # The push is neither complete nor undone, so no call may go on.
                state.monitor.fail(error)
                raise
            assert batch.job is not None
            self._averaging.put(batch.job)
            # Removed only after it is queued: an exception in between leaves it to the next call.
            self._batches.popleft()
        self._sent = True

    def _load(self, batch: "_CopyBatch") -> None:
        """Take the bytes of a batch and start its copies, or do neither."""
        if batch.job is not None:
            return
        try:
            sizes = {key: item.sums.nbytes for key, item in zip(batch.keys, batch.items)}
            names = [item.entry.name for item in batch.items]
            what = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
            self._averaging.take(sizes, what)
            copies = [item.started() for item in batch.items]
            queue = collections.deque(zip(batch.keys, copies, strict=True))
            del copies
            call = functools.partial(_average, self._state, self._averaging, queue)
            # No call comes between the two assignments, and so no interrupt: a batch has either
            # items to copy or a job.
            batch.items, batch.job = [], Job(call)
        except BaseException:
            if batch.job is None:
                for key in batch.keys:
                    self._averaging.give_back(key)
            raise


class _CopyBatch:
    """Arrays that are copied together; later the job that holds their copies."""

    def __init__(self, items: list[Copy]) -> None:
        self.items = items
        self.keys: list[object] = [object() for _ in items]
        self.job: Job | None = None


def _average(
    state: State, averaging: Workers, copies: collections.deque[tuple[object, Copy]]
) -> None:
    """Add copies to the average; release each one and its bytes before the next."""
    assert state.averages is not None
    while copies:
        key, copy = copies.popleft()
        copy.add_to(state.averages)
        # Before its bytes are given back: the name would keep the array alive while the next copy
        # takes the same bytes.
        del copy
        averaging.give_back(key)


def _sums(factors: Factors) -> dict[Place, Any]:
    return {place: side.data for place, side in factors.sides.items()}
