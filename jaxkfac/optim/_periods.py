"""Whether factors come at the steps at which K-FAC asks for them."""

from typing import Any

from jax.core import Tracer

from jaxkfac.factors import Factors
from jaxkfac.optim._trees import is_concrete


def check_factors_have_come(missed: Any, *seen: Factors | None) -> None:
    """Refuse to go on as gradient descent where factors are collected and never arrive.

    Args:
        missed: Refreshes that were due without any; of a traced number nothing is known.
        seen: Where there may be some: the average, and what comes with this call.

    Raises:
        ValueError: two were, and there is still no factor, with the remedy.
    """
    counts = [factors.terms for factors in seen if factors is not None]
    if not all(is_concrete(x) for x in (missed, *counts)):
        return
    if missed > 1 and not any(counts):
        raise ValueError(
            f"kfac: {missed} refreshes were due, and no factors have come so far: the steps at "
            "which they are collected (every=) and those at which kfac gets them do not meet. "
            "Pass stats(..., step=) a number that counts from 0, and accumulate with "
            "jk.multi_steps, which adds up the factors of all micro-batches"
        )


def check_measured_between(every: Any, *, measures: bool) -> None:
    """Refuse eigenvalues measured in eigenvectors that no step uses again.

    Raises:
        ValueError: every step is a refresh, with the remedy.
    """
    if measures and not isinstance(every, Tracer) and every == 1:
        raise ValueError(
            "the factors hold eigenvalues measured in the eigenvectors at hand (bases=), and "
            "refresh_every=1 replaces these at every step, before they are used: take "
            "refresh_every=2 or more"
        )
