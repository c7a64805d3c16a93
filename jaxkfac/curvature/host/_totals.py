"""Averages back to factors."""

import numpy as np

from jaxkfac.curvature.host._average import Averages, Snapshot
from jaxkfac.curvature.host._layout import Place
from jaxkfac.factors._factors import Factors


def totals(averages: Averages, age: int) -> Factors:
    """The average at ``age`` as factors of NumPy arrays.

    Sums over fewer loss terms than others, because contributions were left out or not pushed, are
    scaled to the number of the others: the mean stays that of what was averaged.

    Raises:
        ValueError: an array has never been pushed, or all that was pushed of it left out.
    """
    tables: dict[str, dict[str, np.ndarray]] = {"a": {}, "g": {}, "diagonals": {}}
    a_counts: dict[str, np.ndarray] = {}
    counts: dict[Place, np.ndarray] = {}
    for place, entry in averages.layout.entries.items():
        if place not in averages.running:
            raise ValueError(f"average: {entry.name} has never been pushed")
        held = averages.view(entry, age)
        left_out = averages.left_out.get(entry.name, 0)
        if left_out and not held.count.any():
            raise ValueError(
                f"average: nothing is in that of {entry.name}; {left_out} contributions were left "
                "out, because they were not finite or made it overflow"
            )
        tables[place.table][place.key] = _whole(held)
        if place.table == "a":
            a_counts[place.key] = np.broadcast_to(held.count, entry.stack).copy()
        else:
            counts[place] = held.count
    terms = max(count.max() for count in counts.values())
    for place, count in counts.items():
        _scale(tables[place.table][place.key], count, terms)
    layout = averages.layout
    return Factors(
        tables["a"],
        a_counts,
        tables["g"],
        tables["diagonals"],
        terms,
        layout.layers,
        layout.bias,
    )


def _scale(sums: np.ndarray, count: np.ndarray, terms: np.generic) -> None:
    """Make ``sums`` over ``count`` loss terms those over ``terms``, of the same mean, in place."""
    for index in np.ndindex(count.shape):
        if 0 < count[index] < terms:
            sums[index] *= (terms / count[index]).astype(sums.dtype)


def _whole(held: Snapshot) -> np.ndarray:
    stack = held.entry.stack
    slices = [np.asarray(held.total(index)) for index in np.ndindex(stack)]
    return np.stack(slices).reshape(*stack, *slices[0].shape)
