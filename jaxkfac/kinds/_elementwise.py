"""What kinds without an input side have in common: each element meets data by itself."""

from typing import ClassVar

from jaxkfac.interception import Axes, Kind, SlotEntry, Use


class Elementwise(Kind):
    """A kind whose block is the diagonal of its gradients, or one dense matrix of them.

    A new one says how it is found (``find``), and gives ``gradient``.
    """

    entries: ClassVar = {
        "diagonal": SlotEntry(2),  # squared gradients of the parameter
        "count": SlotEntry(0),
        "gradient": SlotEntry(1, by_example=True),
        "counts": SlotEntry(0, by_example=True),
    }
    rank = 2
    elementwise = True

    def place(self, use: Use, axes: Axes) -> None:
        use.result = axes
