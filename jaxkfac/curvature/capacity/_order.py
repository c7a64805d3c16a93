"""Order statistics of products that are never formed: counts and quantiles."""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from jaxkfac.curvature.capacity._blocks import CapacityBlock

_FEW = 2**14  # candidates that are cheaper to write out than to narrow down


def count_above(block: CapacityBlock, threshold: float) -> int:
    r"""How many $\alpha_i \gamma_j$ exceed ``threshold``, in O(m + n) memory.

    Rounding is monotone, so in each row the products that exceed it, as float64 rounds
    them, are the last ones: one bisection for all rows at once.
    """
    rows = _Rows([block])
    return block.size - int(rows.at_most(threshold, rows.first, rows.last).sum())


def quantiles(blocks: Sequence[CapacityBlock], fractions: Sequence[float]) -> dict[float, float]:
    """For each fraction q the smallest eigenvalue that at least q of all do not exceed.

    This is ``numpy.quantile(..., method="inverted_cdf")``: always one of the eigenvalues.
    O(sum of m + n) memory.
    """
    rows, size = _Rows(blocks), sum(block.size for block in blocks)
    # As a decimal, so that 0.07 of 100 is the seventh.
    ranks = {q: max(math.ceil(Fraction(repr(q)) * size), 1) for q in map(float, fractions)}
    return {q: rows.kth_smallest(rank) for q, rank in ranks.items()}


class _Rows:
    """The rows of several outer products, each ascending, as indices into one flat list."""

    def __init__(self, blocks: Sequence[CapacityBlock]) -> None:
        lengths = [len(block.columns) for block in blocks]
        counts = [len(block.rows) for block in blocks]
        starts = np.cumsum([0, *lengths[:-1]])
        self.factors = np.concatenate([block.rows for block in blocks])
        self.columns = np.concatenate([block.columns for block in blocks])
        self.first = np.repeat(starts, counts)
        self.last = self.first + np.repeat(lengths, counts)
        self.largest = max(float(block.rows[-1] * block.columns[-1]) for block in blocks)

    def at_most(self, value: float, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        """In each row the first position in [low, high] whose product exceeds ``value``."""
        low, high = low.copy(), high.copy()
        while len(rows := np.flatnonzero(low < high)):
            middle = (low[rows] + high[rows]) // 2
            below = self.factors[rows] * self.columns[middle] <= value
            low[rows[below]] = middle[below] + 1
            high[rows[~below]] = middle[~below]
        return low

    def kth_smallest(self, k: int) -> float:
        """Bisect over the bit patterns of float64, which are ordered like the numbers.

        In each row only the positions between the two bounds stay candidates, until few
        are left or the bounds are neighbours: then all candidates are equal.
        """
        lower, upper = -1, int(np.float64(self.largest).view(np.int64))
        low, high = self.first, self.last
        below = 0  # how many do not exceed the lower bound
        while upper - lower > 1 and int((high - low).sum()) > _FEW:
            middle = (lower + upper) // 2
            reached = self.at_most(float(np.int64(middle).view(np.float64)), low, high)
            count = below + int((reached - low).sum())
            if count >= k:
                upper, high = middle, reached
            else:
                lower, low, below = middle, reached, count
        if upper - lower == 1:
            return float(np.int64(upper).view(np.float64))
        widths = high - low
        ends = np.cumsum(widths)
        positions = np.arange(ends[-1]) + np.repeat(low - (ends - widths), widths)
        candidates = np.repeat(self.factors, widths) * self.columns[positions]
        return float(np.partition(candidates, k - below - 1)[k - below - 1])
