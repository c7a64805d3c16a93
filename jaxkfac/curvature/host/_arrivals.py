"""Factors taken apart: one arrival for each array, checked before anything is queued."""

import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from jaxkfac._errors import nearest
from jaxkfac.curvature._home import detached
from jaxkfac.curvature.host._layout import Entry, Layout, Place
from jaxkfac.factors._factors import Factors


class Arrival(NamedTuple):
    """One array of pushed factors.

    Attributes:
        entry: What it is of.
        value: The array: of JAX, or of NumPy.
        count: Its count.
    """

    entry: Entry
    value: Any
    count: Any

    @property
    def nbytes(self) -> int:
        return self.value.size * self.value.dtype.itemsize


def arrivals(factors: Factors, layout: Layout, first: int) -> list[Arrival]:
    """The arrays of factors that may hold some of the layers and some of the iterations.

    Raises:
        ValueError: naming the array that is unknown, traced, deleted or of another shape.
    """
    found = []
    for place, value in _places(factors):
        entry = layout.entries.get(place)
        if entry is None:
            known = nearest(place.key, [p.key for p in layout.entries if p.table == place.table])
            raise ValueError(
                f"push: {place.table} of {place.key!r} belongs to no layer; the nearest are {known}"
            )
        _check(entry, value, first)
        count = factors.a_counts[place.key] if place.table == "a" else factors.terms
        found.append(Arrival(entry, value, count))
    return found


def _places(factors: Factors) -> Iterator[tuple[Place, Any]]:
    tables = {"a": factors.a_sums, "g": factors.g_sums, "diagonals": factors.diagonals}
    for table, arrays in tables.items():
        for key, value in arrays.items():
            yield Place(table, key), value


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


def on_its_way(x: Any) -> Any:
    """Start the copy of ``x`` to the host, without waiting for it.

    A NumPy array that can be written to is copied at once: a later write would show.
    """
    if isinstance(x, jax.Array):
        x = detached(x)
        x.copy_to_host_async()
        return x
    return np.array(x) if not isinstance(x, np.ndarray) or x.flags.writeable else x


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
