"""The examples that one value depends on, and the reason why they meet in it."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxkfac._jaxpr_compat import VarOrLiteral
from jaxkfac.interception.coupling._labels import (
    MIXED,
    Labels,
    LazyIntegers,
    joined,
    mixed,
    no_integers,
)

Question = Literal["value", "derivative"]
QUESTIONS: tuple[Question, ...] = ("value", "derivative")


class Reason(NamedTuple):
    """Where examples meet, or where it is unknown whether they do.

    Attributes:
        certain: Whether a rule says that they meet there.
        where: The equation, in words.
    """

    certain: bool
    where: str


class Dependence(NamedTuple):
    """The examples that a value depends on, for one of the two questions.

    Attributes:
        labels: A label for each entry.
        reason: Where labels were mixed first, if any are mixed.
    """

    labels: Labels = None
    reason: Reason | None = None

    @property
    def mixed(self) -> bool:
        """Whether an entry depends on several examples, or on an unknown one."""
        return self.labels is not None and bool((self.labels == MIXED).any())


class LabeledValue(NamedTuple):
    """One value of a program.

    Attributes:
        value: The examples on whose value it depends.
        derivative: The examples such that it has a derivative with respect to their values, or to
            rows of layers that belong to them.
        parameter: Whether it depends on parameters, and on no example.
        integers: Its entries as far as they are known at trace time.
        moved: The last equation that moved entries of examples to another place.
    """

    value: Dependence = Dependence()
    derivative: Dependence = Dependence()
    parameter: bool = False
    integers: LazyIntegers = no_integers
    moved: str = ""

    @property
    def free(self) -> bool:
        """Whether it depends on no example."""
        return self.value.labels is None and self.derivative.labels is None

    def of(self, question: Question) -> Dependence:
        return self.value if question == "value" else self.derivative

    def with_labels(
        self,
        change: Callable[[Labels], Labels],
        *,
        reason: Reason | None = None,
        integers: LazyIntegers = no_integers,
    ) -> "LabeledValue":
        """The value with other labels for both questions; ``reason`` is where they get mixed."""
        value, before = change(self.value.labels), self.derivative.labels
        # Identity is kept, because later rules compute both questions once where their labels are
        # one object.
        derivative = value if before is self.value.labels else change(before)
        return self._replace(
            value=joined_examples(Dependence(value, self.value.reason), reason=reason),
            derivative=joined_examples(
                Dependence(derivative, self.derivative.reason), reason=reason
            ),
            integers=integers,
        )


def first_reason(dependences: Sequence[Dependence]) -> Reason | None:
    """The first reason in these; a certain one, if there is any."""
    reasons = [x.reason for x in dependences if x.reason is not None]
    return next((r for r in reasons if r.certain), reasons[0] if reasons else None)


def joined_examples(*dependences: Dependence, reason: Reason | None = None) -> Dependence:
    """The dependence of a result of all of these; ``reason`` is where unlike labels meet."""
    labels = joined(*[x.labels for x in dependences])
    out = Dependence(labels, first_reason(dependences))
    # A reason from an operand stays: the message should name the first equation where examples met,
    # not the last one that passed on what was mixed.
    return out._replace(reason=reason) if out.reason is None and out.mixed else out


def joined_values(*values: LabeledValue, where: str) -> LabeledValue:
    """The value of a result that is any one of these."""
    reason = Reason(True, where)
    value = joined_examples(*[x.value for x in values], reason=reason)
    derivative = joined_examples(*[x.derivative for x in values], reason=reason)
    return LabeledValue(
        value,
        derivative,
        any(x.parameter for x in values) and value.labels is None,
        moved=next((x.moved for x in values if x.moved), ""),
    )


def equal_labels(first: LabeledValue, second: LabeledValue) -> bool:
    """Whether the labels are equal, for both questions."""
    pairs = [(first.of(q).labels, second.of(q).labels) for q in QUESTIONS]
    return all(
        x is y if x is None or y is None else x.shape == y.shape and bool((x == y).all())
        for x, y in pairs
    )


def is_inexact(var: VarOrLiteral) -> bool:
    return jnp.issubdtype(getattr(var.aval, "dtype", np.dtype(bool)), jnp.inexact)


def rank_of(var: VarOrLiteral) -> int:
    return len(getattr(var.aval, "shape", ()))


def unknown(var: VarOrLiteral, reason: Reason, *, derivative: bool = True) -> LabeledValue:
    """A value about which nothing is known."""
    every = Dependence(mixed(rank_of(var)), reason)
    # Integers and booleans carry no derivative, whatever they depend on.
    return LabeledValue(every, every if derivative and is_inexact(var) else Dependence())
