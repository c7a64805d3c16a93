"""Averages back to factors."""

import numpy as np

from jaxkfac.curvature.host._average import Averages, Snapshot
from jaxkfac.factors._factors import Factors


def totals(averages: Averages, age: int) -> Factors:
    """The average at ``age`` as factors of NumPy arrays.

    Raises:
        ValueError: output sides have different counts.
    """
    tables: dict[str, dict[str, np.ndarray]] = {"a": {}, "g": {}, "diagonals": {}}
    a_counts: dict[str, np.ndarray] = {}
    terms: list[np.ndarray] = []
    for place, entry in averages.layout.entries.items():
        if place not in averages.running:
            raise ValueError(f"average: {entry.name} has never been pushed")
        held = averages.view(entry, age)
        tables[place.table][place.key] = _whole(held)
        if place.table == "a":
            a_counts[place.key] = np.broadcast_to(held.count, entry.stack).copy()
        else:
            terms.append(held.count)
    values = np.unique(np.concatenate([count.reshape(-1) for count in terms]))
    if len(values) > 1:
        raise ValueError(
            f"average: layers were pushed for different numbers of loss terms ({values.min()} to "
            f"{values.max()}), which the single count of Factors cannot say"
        )
    layout = averages.layout
    return Factors(
        tables["a"],
        a_counts,
        tables["g"],
        tables["diagonals"],
        values.reshape(-1)[0],
        layout.layers,
        layout.bias,
    )


def _whole(held: Snapshot) -> np.ndarray:
    stack = held.entry.stack
    slices = [np.asarray(held.total(index)) for index in np.ndindex(stack)]
    return np.stack(slices).reshape(*stack, *slices[0].shape)
