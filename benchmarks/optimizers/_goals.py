"""What K-FAC is to reach on each problem, and whether the record says so."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from benchmarks.optimizers._summary import Row

Rows = Mapping[str, Row]
OURS = ("kfac_fixed", "kfac_adaptive")


class Goal(NamedTuple):
    """A number of ours, the better of fixed and adaptive, at most ``factor`` times another's.

    Attributes:
        words: What is compared.
        ours: Names of ours.
        other: Name of the other.
        factor: As above.
        value: What is compared of a row: a median, or ``None`` where it is not known.
    """

    words: str
    ours: tuple[str, ...]
    other: str
    factor: float
    value: Callable[[Row], float | None]

    def said(self, rows: Rows) -> str:
        """One line: reached or not, and by which numbers."""
        known = [x for name in self.ours if (x := self.value(rows[name])) is not None]
        other = self.value(rows[self.other])
        if not known or other is None:
            return f"- {self.words}: waits for runs"
        bound = self.factor * other
        word = "reached" if min(known) <= bound else "NOT reached"
        return f"- {self.words}: {word}, {min(known):.4g} against {bound:.4g}"


def _final(row: Row) -> float | None:
    return None if row.final is None else row.final[0]


def _at_steps(row: Row) -> float | None:
    return None if row.at_steps is None else row.at_steps[0]


def _to_target(row: Row) -> float | None:
    return None if row.to_target is None else row.to_target[0]


def _sooner(factor: float) -> Goal:
    words = f"CPU seconds to the target, at most {factor:g} x AdamW's"
    return Goal(words, OURS, "adamw", factor, _to_target)


_EQUAL = "validation at equal steps, adaptive, at most that of kfac-jax's adaptive"
_NETWORK = (
    Goal("error at the end of the budget, at most 0.1 x AdamW's", OURS, "adamw", 0.1, _final),
    Goal("error at the end of the budget, at most L-BFGS's", OURS, "lbfgs", 1.0, _final),
)
GOALS: dict[str, tuple[Goal, ...]] = {
    "autoencoder": (
        Goal(_EQUAL, ("kfac_adaptive",), "kfac_jax_adaptive", 1.0, _at_steps),
        _sooner(0.6),
    ),
    "poisson": _NETWORK,
    "burgers": _NETWORK,
    "decoder": (_sooner(1.0),),
    "resnet": (_sooner(1.0),),
}
