"""A push, all or nothing: prepared beside the service, committed by one assignment, then sent."""

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
from jaxkfac.curvature._layout import Entry, Layout, Place
from jaxkfac.curvature._placement import result_sharding
from jaxkfac.curvature.host._average import Averages
from jaxkfac.curvature.host._options import Schedule, is_double
from jaxkfac.curvature.host._state import State
from jaxkfac.curvature.host._threads import Job, Workers
from jaxkfac.factors import Factors, Origin
from jaxkfac.memory import whole_here

# ---------------- a push: each of its arrays is checked, copied to the host, and becomes part of
# its average


def arrays_of(factors: Factors, layout: Layout, first: int) -> list[tuple[Entry, Any, Any]]:
    """``(entry, sums, count)`` of all arrays of factors, which may be a part of those of a step.

    Args:
        factors: Of some of the layers, and of stacked ones some of the iterations.
        layout: What is averaged.
        first: The first of the iterations.

    Raises:
        ValueError: naming the array that is unknown, traced, deleted or of another shape.
    """
    found = []
    tables = {"a": factors.a_sums, "g": factors.g_sums, "diagonals": factors.diagonals}
    for table, arrays in tables.items():
        for key, value in arrays.items():
            entry = layout.entries.get(Place(table, key))
            if entry is None:
                known = nearest(
                    key, [place.key for place in layout.entries if place.table == table]
                )
                raise ValueError(
                    f"push: {table} of {key!r} belongs to no layer; the nearest are {known}"
                )
            _check(entry, value, first)
            found.append((entry, value, factors.a_counts[key] if table == "a" else factors.terms))
    return found


def _check(entry: Entry, value: Any, first: int) -> None:
    if isinstance(value, Tracer):
        raise ValueError(
            f"push: {entry.name} is traced; push outside of jit, scan and grad, with the factors "
            "that the compiled function returned"
        )
    if not isinstance(value, jax.Array | np.ndarray):
        raise ValueError(f"push: {entry.name} is no array but {type(value).__name__}")
    if isinstance(value, jax.Array) and value.is_deleted():
        raise ValueError(
            f"push: {entry.name} has been deleted or donated; push factors before they are "
            "donated to another function"
        )
    shape, expected = value.shape, entry.shape
    if expected is None:
        if value.size != entry.size:
            raise ValueError(f"push: {entry.name} has {value.size} elements, not {entry.size}")
        return
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

    A NumPy array that can be written to is copied at once: a later write would show. Of an array
    on devices of several processes, all of them exchange their parts first.
    """
    if isinstance(x, jax.Array):
        x = whole_here(x)
        x.copy_to_host_async()
        return x
    return np.array(x) if not isinstance(x, np.ndarray) or x.flags.writeable else x


@dataclasses.dataclass
class Copy:
    """A copy that has been started, on its way into the average.

    Attributes:
        entry: What it is of.
        sums: What :func:`start_copy` gave.
        count: Likewise.
        first: The first iteration that it holds.
        step: That of the push, for errors.
        age: How many steps had been pushed by then.
        donated: The array to delete afterwards, if any.
    """

    entry: Entry
    sums: Any
    count: Any
    first: int
    step: int
    age: int
    donated: jax.Array | None

    def add_to(self, averages: Averages) -> None:
        """Wait for the copy, add it, and delete what was donated."""
        try:
            sums, count = np.asarray(self.sums), np.asarray(self.count)
            averages.add(self.entry, sums, count, self.first, self.age)
            if self.donated is not None:
                self.donated.delete()
        except BaseException as error:
            error.add_note(
                f"while HostCurvature averaged {self.entry.name} of step {self.step}; "
                "a pushed array must not be donated or deleted before flush()"
            )
            raise


def as_step(step: Any) -> int:
    """A step number as an int; JAX and NumPy integers count.

    Raises:
        ValueError: it is negative, or no integer.
    """
    try:
        number = operator.index(step)
    except TypeError:
        raise ValueError(f"step must be an integer, got {step!r}") from None
    if number < 0:
        raise ValueError(f"step must be zero or positive, got {number}")
    return number


# ----------------


class Push:
    """Factors of one step on their way into the average.

    Until a service holds this object, :meth:`prepare` has changed nothing that a later call could
    see. From then on the factors belong to the step: :meth:`send` completes the push, and where
    an exception interrupts it, calling it again goes on. Every line of it may run twice.

    What fits into the bytes in flight is copied before the service holds it, so that a failure
    of a copy leaves the average as it was. What is larger goes one array after the other, as
    room appears; only the copy of the first is then certain.

    Args:
        state: Of the service.
        averaging: The thread that adds to the average.
        factors: What :meth:`HostCurvature.push` takes.
        step: Likewise.
        first_iteration: Likewise.
        donate: Likewise.

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
        if not state.seen and not state.complete:
            self._origin = factors.origin
        arrays = arrays_of(factors, self._layout, first_iteration)
        self._arrays = {place: weakref.ref(sums) for place, sums in _sums(factors).items()}
        self._age = state.schedule.pushed_to(step).age
        state.check_budget(self._layout, double=self._double)
        self._places = {entry.place for entry, _, _ in arrays}
        self._shardings = {entry.place: result_sharding(sums) for entry, sums, _ in arrays}
        # An array that stands for two of them is deleted after the last one.
        last_use = {id(sums): i for i, (_, sums, _) in enumerate(arrays)} if donate else {}
        donated = [
            sums if last_use.get(id(sums)) == i and isinstance(sums, jax.Array) else None
            for i, (_, sums, _) in enumerate(arrays)
        ]
        self._num_arrays = len(arrays)
        items = [_Item(*array, gone) for array, gone in zip(arrays, donated, strict=True)]
        fits = sum(item.sums.nbytes for item in items) <= state.options.in_flight_bytes
        parts = [items] if fits else [[item] for item in items]
        self._parts = collections.deque(_Part(part) for part in parts if part)
        self._schedule: Schedule | None = None

    def is_of(self, factors: Factors, step: int, first_iteration: int) -> bool:
        """Whether this is the push of the same arrays at the same step."""
        others = _sums(factors)
        return (step, first_iteration, others.keys()) == (
            self._step,
            self._first,
            self._arrays.keys(),
        ) and all(self._arrays[place]() is sums for place, sums in others.items())

    def prepare(self) -> None:
        """Start the copies: of everything, or of the first array where that does not fit."""
        # A loaded service does not know where its factors are, and a hand-over asks.
        self._state.shardings |= self._shardings
        if self._parts:
            self._load(self._parts[0])

    def after(self, schedule: Schedule) -> None:
        """Fix the schedule of once this is pushed, after everything due has been done."""
        self._schedule = schedule.pushed_to(self._step)

    def withdraw(self) -> None:
        """Give back what a push has taken that no service holds."""
        for part in self._parts:
            for key in part.keys:
                self._averaging.give_back(key)

    def send(self) -> None:
        """Make the factors part of the step; returns at once where that has been done."""
        if self._sent:
            return
        state = self._state
        assert self._schedule is not None
        state.use_layout(self._layout, double=self._double)
        state.origin, state.schedule = self._origin, self._schedule
        state.seen |= self._places
        while self._parts:
            part = self._parts[0]
            try:
                self._load(part)
            except TimeoutError as error:
                error.add_note(
                    f"{self._num_arrays - len(self._parts)} of the {self._num_arrays} arrays of "
                    f"the push at step {self._step} have been sent, and the next call to this "
                    "service sends the others; pushing them again goes on too, and counts none "
                    "twice"
                )
                raise
            except Exception as error:
                # Neither whole nor undone: no call may go on as if nothing had happened.
                state.monitor.fail(error)
                raise
            assert part.job is not None
            self._averaging.put(part.job)
            self._parts.popleft()
        self._sent = True

    def _load(self, part: "_Part") -> None:
        """Take the bytes of a part and start its copies, or neither."""
        if part.job is not None:
            return
        try:
            sizes = {key: item.sums.nbytes for key, item in zip(part.keys, part.items)}
            names = [item.entry.name for item in part.items]
            what = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
            self._averaging.take(sizes, what)
            copies = [
                Copy(
                    item.entry,
                    start_copy(item.sums),
                    start_copy(item.count),
                    self._first,
                    self._step,
                    self._age,
                    item.donated,
                )
                for item in part.items
            ]
            queue = collections.deque(zip(part.keys, copies, strict=True))
            del copies
            call = functools.partial(_average, self._state, self._averaging, queue)
            part.items, part.job = [], Job(call)
        except BaseException:
            if part.job is None:
                for key in part.keys:
                    self._averaging.give_back(key)
            raise


@dataclasses.dataclass(frozen=True)
class _Item:
    entry: Entry
    sums: Any
    count: Any
    donated: jax.Array | None


class _Part:
    """What is copied together: its arrays, then the job that holds their copies."""

    def __init__(self, items: list[_Item]) -> None:
        self.items = items
        self.keys: list[object] = [object() for _ in items]
        self.job: Job | None = None


def _average(
    state: State, averaging: Workers, copies: collections.deque[tuple[object, Copy]]
) -> None:
    """Add copies to the average, letting go of each and of its bytes before the next."""
    assert state.averages is not None
    while copies:
        key, copy = copies.popleft()
        copy.add_to(state.averages)
        del copy
        averaging.give_back(key)


def _sums(factors: Factors) -> dict[tuple[str, str], Any]:
    tables = {"a": factors.a_sums, "g": factors.g_sums, "diagonals": factors.diagonals}
    return {(name, key): x for name, table in tables.items() for key, x in table.items()}
