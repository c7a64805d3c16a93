"""Follow every value of a program to find the examples that it depends on.

An interpreter of the jaxpr, from the inputs, whose leading axes are the examples, to the outputs.
It answers two questions at once. **Value**: on which examples' values does an entry depend?
**Derivative**: with respect to which examples' values, or rows of layers, does it have a
derivative? A value that is stopped, compared or rounded to an integer has no derivative and may
still be read, so each question has its own labels (``_labels``). Where they agree, they are one
object and are computed once.

A row of a layer starts with the label of its example. If its value has no label (a constant, or
something that was stopped and is mixed), any label will do: it only names the example whose outputs
the row may reach, and the outputs show whether that is so.

Nothing is assumed about a primitive without a rule, a call that is not followed, or a rule that
fails: their results are mixed, and the reason says that the answer is unknown.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxkfac._jaxpr_compat import (
    Eqn,
    Jaxpr,
    VarOrLiteral,
    bodies_of,
    body_of,
    call_kind,
    is_mutable,
    is_stateful,
)
from jaxkfac.interception._plan import Plan
from jaxkfac.interception.coupling._calls import CALLS, COLLECTIVES
from jaxkfac.interception.coupling._first_order import is_certain, rule_of
from jaxkfac.interception.coupling._labels import (
    FREE,
    MIXED,
    KnownArray,
    Labels,
    TooManyLabelsError,
    can_be_known,
    computed_once,
    examples_along,
    known_result,
    mixed,
    no_integers,
)
from jaxkfac.interception.coupling._loops import Follows
from jaxkfac.interception.coupling._values import (
    QUESTIONS,
    Dependence,
    LabeledValue,
    Question,
    Reason,
    first_reason,
    is_inexact,
    joined_examples,
    joined_values,
    rank_of,
    unknown,
)

_MOVES = frozenset(
    "gather scatter slice dynamic_slice dynamic_update_slice rev concatenate pad split".split()
)
MOST_UNROLLED = 20_000  # equations in loops that may be followed iteration by iteration


class Follower(Follows):
    """The interpreter.

    Args:
        number: Number of examples.

    Attributes:
        next_label: The next label that stands for no example; loops use some.
        unrolled: Number of equations in loops that may still be followed iteration by iteration.
        shards: For each enclosing ``shard_map``, the labels that differ between devices.
        rules: Programs of custom derivatives, by ``id`` of the equation and of its operands.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.next_label = number
        self.unrolled = MOST_UNROLLED
        self.shards: list[Any] = []
        self.rules: dict[tuple[int, ...], Any] = {}

    def run(
        self,
        jaxpr: Jaxpr,
        consts: Sequence[Any],
        ins: Sequence[LabeledValue],
        within: Plan | None = None,
    ) -> list[LabeledValue]:
        """The values of the results of a jaxpr; ``within`` has the layers in it, if known."""
        # The plan knows equations by position, and positions differ in a program that JAX has
        # rebuilt.
        if within is not None and list(map(id, within.jaxpr.eqns)) != list(map(id, jaxpr.eqns)):
            within = None
        return super().run(jaxpr, consts, ins, within)

    def constant(self, operand: VarOrLiteral, value: Any) -> LabeledValue:
        if not can_be_known(operand):
            return LabeledValue()

        def ask() -> KnownArray | None:
            try:
                return KnownArray.of(np.asarray(value))
            except Exception:  # a tracer: the constant is not known yet
                return None

        return LabeledValue(integers=computed_once(ask))

    def equation(
        self, eqn: Eqn, ins: Sequence[LabeledValue], position: int, within: Plan | None
    ) -> list[LabeledValue]:
        """The values of the results of an equation."""
        name = eqn.primitive.name
        try:
            outs = self._followed(eqn, ins, within, position)
        except TooManyLabelsError as error:
            outs = self._unknown(eqn, ins, f"at `{name}` ({error})")
        except Exception as error:  # a rule that fails proves nothing
            # A new primitive, or a parameter that a new JAX has renamed, must cost an answer and
            # not the user's training.
            outs = self._unknown(eqn, ins, f"at `{name}`, whose rule failed: {error!r:.200}")
        return outs

    def _followed(
        self, eqn: Eqn, ins: Sequence[LabeledValue], plan: Plan | None, position: int
    ) -> list[LabeledValue]:
        kind, name = call_kind(eqn), eqn.primitive.name
        inner = plan.calls.get(position) if plan is not None else None
        uses = plan is not None and position in plan.uses
        # A mutable array may hold what an earlier equation wrote, which no operand shows.
        if any(map(is_mutable, (*eqn.invars, *eqn.outvars))) or (
            kind is None and is_stateful(eqn) and name not in COLLECTIVES
        ):
            return [unknown(v, Reason(False, f"at `{name}`")) for v in eqn.outvars]
        # A layer of constants still has rows, which belong to examples further on.
        has_uses = uses or (inner is not None and bool(inner.all_uses()))
        if all(x.free for x in ins) and not has_uses:
            return self._constants(eqn, ins, kind)
        if kind in ("jit", "checkpoint"):
            outs = self.run(*body_of(eqn), ins, inner)
        elif kind == "cond":
            outs = self._cond(eqn, ins, inner)
        elif (into := CALLS.get(kind or name)) is not None:
            outs = into(self, eqn, ins, inner)
        elif (rule := rule_of(eqn)) is not None:
            outs = self._by_rule(eqn, ins, rule)
        else:
            outs = self._unknown(eqn, ins, f"at `{name}`")
        parameters = any(x.parameter for x in ins)
        outs = [
            self._without_derivative(eqn, v, x, parameters)
            for v, x in zip(eqn.outvars, outs, strict=True)
        ]
        # The rule of a custom derivative may use parameters in any way, so its results count as
        # rows.
        if uses or (kind == "custom" and parameters):
            outs = [self.as_rows(v, x) for v, x in zip(eqn.outvars, outs, strict=True)]
        return outs

    def _constants(
        self, eqn: Eqn, ins: Sequence[LabeledValue], kind: str | None
    ) -> list[LabeledValue]:
        """The results of an equation of constants and parameters alone."""
        parameter = any(x.parameter for x in ins)
        # `jnp` wraps small index computations in `jit`; followed inside, their values stay known.
        if kind in ("jit", "checkpoint") and not parameter and _may_know(eqn):
            return self.run(*body_of(eqn), ins)
        if parameter or kind is not None or not _may_know(eqn):
            return [LabeledValue(parameter=parameter) for _ in eqn.outvars]
        integers = [x.integers for x in ins]
        return [
            LabeledValue(integers=known_result(eqn, integers, k)) for k in range(len(eqn.outvars))
        ]

    def _by_rule(
        self, eqn: Eqn, ins: Sequence[LabeledValue], rule: Callable[..., Any]
    ) -> list[LabeledValue]:
        integers = [x.integers for x in ins]
        by_question: dict[Question, list[Dependence]] = {}
        for question in QUESTIONS:
            dependences = [x.of(question) for x in ins]
            # In most programs both questions have the same labels; rules then run once.
            if question == "derivative" and all(x.value.labels is x.derivative.labels for x in ins):
                by_question[question] = by_question["value"]
                continue
            by_question[question] = self._one_question(eqn, dependences, rule, integers)
        moved = next((x.moved for x in ins if x.moved), "")
        if eqn.primitive.name in _MOVES or eqn.primitive.name.startswith("scatter"):
            moved = eqn.primitive.name
        result_integers = no_integers
        if len(eqn.outvars) == 1 and _may_know(eqn) and eqn.primitive.name == "concatenate":
            result_integers = known_result(eqn, integers)  # some of its columns may be known
        elif len(eqn.outvars) == 1 and _may_know(eqn) and len(ins) == 1:
            result_integers = known_result(eqn, integers)
        return [
            LabeledValue(x, y, integers=result_integers, moved=moved)
            for x, y in zip(by_question["value"], by_question["derivative"], strict=True)
        ]

    def _one_question(
        self, eqn: Eqn, ins: Sequence[Dependence], rule: Callable[..., Any], integers: Sequence[Any]
    ) -> list[Dependence]:
        if all(x.labels is None for x in ins):
            return [Dependence() for _ in eqn.outvars]
        reason, outs = first_reason(ins), []
        for labels in rule(eqn, [x.labels for x in ins], integers):
            out = Dependence(labels, reason)
            # An equation that only passes labels on is not where examples met.
            if reason is None and not any(labels is x.labels for x in ins) and out.mixed:
                certain = is_certain(eqn, integers)
                out = out._replace(reason=Reason(certain, f"at `{eqn.primitive.name}`"))
            outs.append(out)
        return outs

    def _without_derivative(
        self, eqn: Eqn, var: VarOrLiteral, out: LabeledValue, parameters: bool
    ) -> LabeledValue:
        """The value without its derivative if it has none, or with one if it is a new row."""
        if not is_inexact(var) or eqn.primitive.name == "stop_gradient":
            return out._replace(derivative=Dependence())
        # Parameters times a value without a derivative (a stopped gradient) make new rows, which
        # belong to the examples of that value.
        if parameters and out.derivative.labels is not out.value.labels:
            return out._replace(derivative=_filled(out.derivative, out.value.labels))
        return out

    def as_rows(self, var: VarOrLiteral, out: LabeledValue) -> LabeledValue:
        """The result of a layer, with labels for the rows that have none."""
        if not is_inexact(var) or (
            out.derivative.labels is not None and not (out.derivative.labels == FREE).any()
        ):
            return out
        shape, guess = var.aval.shape, None
        for d, size in enumerate(shape):
            if size == self.number:
                guess = examples_along(d, len(shape), size)
                break
            if guess is None and size > self.number and size % self.number == 0:
                guess = np.repeat(
                    examples_along(d, len(shape), self.number), size // self.number, d
                )
        reason = None if guess is not None else Reason(False, "in rows without an example axis")
        guess = mixed(len(shape)) if guess is None else guess
        derivative = _filled(out.derivative, guess, every=True)
        if derivative.reason is None and derivative.mixed:
            derivative = derivative._replace(reason=reason)
        return out._replace(derivative=derivative)

    def _cond(self, eqn: Eqn, ins: Sequence[LabeledValue], plan: Plan | None) -> list[LabeledValue]:
        """The results of a cond: those of any branch, and the index decides which."""
        index, *operands = ins
        plans = {} if plan is None else plan.calls
        branch_results = [
            self.run(*branch, operands, plans.get(k)) for k, branch in enumerate(bodies_of(eqn))
        ]
        # Only the value of the index counts: which branch runs has no derivative.
        choice = LabeledValue(index.value)
        outs = []
        for var, results in zip(eqn.outvars, zip(*branch_results, strict=True), strict=True):
            alternatives = [_at_rank(choice, rank_of(var)), *results]
            outs.append(joined_values(*alternatives, where="at `cond`"))
        return outs

    def _unknown(self, eqn: Eqn, ins: Sequence[LabeledValue], where: str) -> list[LabeledValue]:
        """The results of an equation about which nothing is known except its operands."""
        reason = Reason(False, where)
        # If operands were mixed before, the message names that place and not this one.
        value = first_reason([x.value for x in ins]) or reason
        has_derivative = any(x.derivative.labels is not None or x.parameter for x in ins)
        return [unknown(v, value, derivative=has_derivative) for v in eqn.outvars]


def _may_know(eqn: Eqn) -> bool:
    return all(map(can_be_known, (*eqn.invars, *eqn.outvars)))


def _at_rank(value: LabeledValue, rank: int) -> LabeledValue:
    """The labels of a scalar, with the rank of another value."""
    labels = value.value.labels
    if labels is None:
        return value
    return LabeledValue(Dependence(labels.reshape((1,) * rank), value.value.reason))


def _filled(dependence: Dependence, labels: Labels, *, every: bool = False) -> Dependence:
    """``dependence`` with labels where it has none; mixed labels are used only if ``every``."""
    if labels is None:
        return dependence
    if not every:
        labels = np.where(labels == MIXED, np.int32(FREE), labels)
    if dependence.labels is None:
        return joined_examples(dependence, Dependence(labels if (labels != FREE).any() else None))
    return dependence._replace(
        labels=np.where(dependence.labels == FREE, labels, dependence.labels)
    )
