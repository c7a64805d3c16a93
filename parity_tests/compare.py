"""How far two results are apart, and an error that says where."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np


class ParityError(AssertionError):
    """The two sides differ by more than the tolerance, or in a shape."""


class Pair(NamedTuple):
    """One result of both sides.

    Attributes:
        layer: Where it is from.
        what: Which result of this layer.
        ours: jaxkfac's.
        reference: torch_ref's, in jaxkfac's layout.
    """

    layer: str
    what: str
    ours: Any
    reference: Any


class Difference(NamedTuple):
    """The pair that is furthest apart."""

    layer: str
    what: str
    error: float

    @property
    def digits(self) -> float:
        """Decimal digits in common; 17, more than float64 has, where nothing differs."""
        return min(17.0, -math.log10(self.error)) if self.error else 17.0


def to_numpy(x: Any) -> np.ndarray:
    """An array of either framework in float64; integers and booleans become numbers."""
    if hasattr(x, "detach"):
        x = x.detach().cpu()
        x = x.double() if x.is_floating_point() else x
    return np.asarray(x).astype(np.float64)


def relative_error(ours: np.ndarray, reference: np.ndarray) -> float:
    """Largest difference over the reference's largest entry; infinite if any is not finite.

    Equal infinities are equal. Where the reference is all zero the difference itself counts.
    """
    with np.errstate(invalid="ignore"):
        distance = np.where(ours == reference, 0.0, np.abs(ours - reference))
    if not np.isfinite(distance).all():
        return math.inf
    finite = np.abs(reference[np.isfinite(reference)])
    largest = finite.max(initial=0.0)
    return float(distance.max(initial=0.0) / (largest or 1.0))


def furthest(pairs: Iterable[Pair]) -> Difference:
    """The pair with the largest relative error.

    Raises:
        ParityError: naming the layer and both shapes where they differ, or if there are no
            pairs at all.
    """
    worst = None
    for layer, what, ours, reference in pairs:
        x, y = to_numpy(ours), to_numpy(reference)
        if x.shape != y.shape:
            raise ParityError(
                f"layer {layer!r}, {what}: jaxkfac has the shape {x.shape}, torch_ref {y.shape}"
            )
        error = relative_error(x, y)
        if worst is None or error > worst.error:
            worst = Difference(layer, what, error)
    if worst is None:
        raise ParityError("there is nothing to compare")
    return worst
