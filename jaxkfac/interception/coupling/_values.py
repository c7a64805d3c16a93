"""What is known of one value: which examples it depends on, and why they meet in it."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxkfac.interception.coupling._labels import MIXED, Ask, Labels, joined, mixed, nothing

Question = Literal["value", "derivative"]
QUESTIONS: tuple[Question, ...] = ("value", "derivative")


class Reason(NamedTuple):
    """Where examples meet, or where it is not known whether they do.

    Attributes:
        certain: Whether a rule says that they meet there.
        where: The equation, in words.
    """

    certain: bool
    where: str


class Dependence(NamedTuple):
    """The examples that a value depends on, for one of the two questions.

    Attributes:
        labels: Entry by entry.
        reason: Where labels were mixed first, if any are.
    """

    labels: Labels = None
    reason: Reason | None = None

    @property
    def mixed(self) -> bool:
        """Whether an entry depends on several examples, or on one that is not known."""
        return self.labels is not None and bool((self.labels == MIXED).any())


class LabeledValue(NamedTuple):
    """One value of a program.

    Attributes:
        value: The examples whose value it depends on.
        derivative: The examples in which, and in whose layers' rows, it has a derivative.
        parameter: Whether it depends on parameters, and on no example.
        known: What is known of its entries.
        moved: The last equation that put entries of examples in another place.
    """

    value: Dependence = Dependence()
    derivative: Dependence = Dependence()
    parameter: bool = False
    known: Ask = nothing
    moved: str = ""

    @property
    def free(self) -> bool:
        """Whether it depends on no example."""
        return self.value.labels is None and self.derivative.labels is None

    def of(self, question: Question) -> Dependence:
        return self.value if question == "value" else self.derivative


def first_reason(each: Sequence[Dependence]) -> Reason | None:
    """Where examples meet in one of these; certainly, if that is known of any."""
    reasons = [x.reason for x in each if x.reason is not None]
    return next((r for r in reasons if r.certain), reasons[0] if reasons else None)


def joined_examples(*each: Dependence, reason: Reason | None = None) -> Dependence:
    """Those of what depends on all of these; ``reason`` is where unlike ones meet."""
    labels = joined(*[x.labels for x in each])
    out = Dependence(labels, first_reason(each))
    return out._replace(reason=reason) if out.reason is None and out.mixed else out


def joined_values(*each: LabeledValue, where: str) -> LabeledValue:
    """The value that is any of these."""
    reason = Reason(True, where)
    value = joined_examples(*[x.value for x in each], reason=reason)
    derivative = joined_examples(*[x.derivative for x in each], reason=reason)
    return LabeledValue(
        value,
        derivative,
        any(x.parameter for x in each) and value.labels is None,
        moved=next((x.moved for x in each if x.moved), ""),
    )


def same(one: Dependence, other: Dependence) -> bool:
    """Whether the labels are equal."""
    if one.labels is None or other.labels is None:
        return one.labels is other.labels
    return one.labels.shape == other.labels.shape and bool((one.labels == other.labels).all())


def is_inexact(var: Any) -> bool:
    return jnp.issubdtype(getattr(var.aval, "dtype", np.dtype(bool)), jnp.inexact)


def rank_of(var: Any) -> int:
    return len(getattr(var.aval, "shape", ()))


def unknown(var: Any, reason: Reason, *, derivative: bool = True) -> LabeledValue:
    """A value of which nothing can be said."""
    every = Dependence(mixed(rank_of(var)), reason)
    return LabeledValue(every, every if derivative and is_inexact(var) else Dependence())
