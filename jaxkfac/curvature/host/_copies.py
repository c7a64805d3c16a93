"""A push: each of its arrays is checked, copied to the host, and becomes part of its average."""

import dataclasses
import operator
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jaxkfac._errors import nearest
from jaxkfac.curvature._layout import Entry, Layout, Place
from jaxkfac.curvature.host._average import Averages
from jaxkfac.factors import Factors
from jaxkfac.memory import whole_here


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
