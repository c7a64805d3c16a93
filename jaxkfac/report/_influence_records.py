"""What an influence run has found, as plain records."""

from collections.abc import Sequence
from typing import Any, NamedTuple


class ScoredText(NamedTuple):
    """A training text beside a query.

    Attributes:
        row: Its number in its file, from 1.
        score: Positive: training on it lowers the query's loss.
        text: In words.
        tokens: ``(token, its part of the score)``, in order.
    """

    row: int
    score: float
    text: str
    tokens: Sequence[tuple[str, float]] = ()


class QueryRecord(NamedTuple):
    """A query and the texts that say most about it.

    Attributes:
        row: Its number in its file, from 1.
        text: In words.
        helpful: Texts with the largest scores, the largest first.
        harmful: Those with the smallest, the smallest first.
        mean: Of all scores.
        spread: Their standard deviation.
        lost: The part of its gradient that holding it at low rank has lost: of the layer where
            that is most, as a ratio of norms.
    """

    row: int
    text: str
    helpful: Sequence[ScoredText]
    harmful: Sequence[ScoredText]
    mean: float
    spread: float
    lost: float

    def to_plain(self) -> dict[str, Any]:
        """Plain values that survive JSON."""
        lists = {name: [x._asdict() for x in getattr(self, name)] for name in _LISTS}
        return self._asdict() | lists


_LISTS = ("helpful", "harmful")
