"""Intervals of accuracies, and whether two models differ on the same questions."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool


class ProportionInterval(NamedTuple):
    """A part of some number of trials, and where the true part may lie.

    Attributes:
        value: The part that was seen, in [0, 1].
        low: Lower end.
        high: Upper end.
        count: Trials.
    """

    value: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"{self.value:.1%} [{self.low:.1%}, {self.high:.1%}]"


class Comparison(NamedTuple):
    """Two models on the same questions.

    Attributes:
        gained: Wrong before, right after.
        lost: Right before, wrong after.
        p_value: McNemar's exact test, two sides: how likely so uneven a split of the questions
            that changed is, if gains and losses are equally likely.
    """

    gained: int
    lost: int
    p_value: float


def wilson_interval(right: int, count: int, *, confidence: float = 0.95) -> ProportionInterval:
    """Wilson's score interval: it stays inside [0, 1], and holds for few trials too.

    Args:
        right: Trials that went well.
        count: All of them, at least 1.
        confidence: In (0, 1).

    Raises:
        ValueError: ``right`` is not in ``0 .. count``.

    Example:
        >>> print(wilson_interval(8, 10))
        80.0% [49.0%, 94.3%]

    References:
        E. B. Wilson, Probable inference, the law of succession, and statistical inference, 1927.
    """
    from scipy.stats import binomtest

    if not 0 <= right <= count or count < 1:
        raise ValueError(f"expected 0 <= right <= count and a trial, got {right} of {count}")
    ends = binomtest(right, count).proportion_ci(confidence, method="wilson")
    return ProportionInterval(right / count, float(ends.low), float(ends.high), count)


def compare(
    before: Bool[np.ndarray, " questions"], after: Bool[np.ndarray, " questions"]
) -> Comparison:
    """McNemar's exact test on paired answers.

    Args:
        before: Which questions one model answered rightly.
        after: Which the other one did, in the same order.

    Raises:
        ValueError: they are not of the same questions.

    Example:
        >>> compare(np.array([True, False, False]), np.array([True, True, True]))
        Comparison(gained=2, lost=0, p_value=0.5)

    References:
        Q. McNemar, Note on the sampling error of the difference between correlated proportions
        or percentages, 1947.
    """
    from scipy.stats import binomtest

    if before.shape != after.shape:
        raise ValueError(f"expected the same questions, got {len(before)} and {len(after)} answers")
    gained, lost = int((~before & after).sum()), int((before & ~after).sum())
    changed = gained + lost
    p_value = float(binomtest(gained, changed).pvalue) if changed else 1.0
    return Comparison(gained, lost, p_value)
