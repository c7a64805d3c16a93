"""Loops: a body that sees one slice of an array at a time.

One iteration sees the slices ``x[t]`` of a scanned operand, and their labels differ from iteration
to iteration. The body is followed once for all iterations: a **column**, the labels of one entry
over the iterations, becomes a label of its own and is put back in the stacked results. In the next
iteration a carry belongs to another example, so such a label becomes mixed in a carry. If that, or
an index that counts iterations, prevents a proof, a short loop is followed iteration by iteration.
``_shards`` treats the devices of a ``shard_map`` as such columns too.
"""

import abc
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxkfac._interpreter import Interpreter
from jaxkfac._jaxpr_compat import (
    Eqn,
    Jaxpr,
    VarOrLiteral,
    body_of,
    jaxprs_in,
    num_iterations,
    open_jaxpr,
    scan_counts,
)
from jaxkfac.interception._plan import Plan
from jaxkfac.interception.coupling._labels import (
    FREE,
    MIXED,
    KnownArray,
    Labels,
    LazyIntegers,
    check_size,
    no_integers,
    simplified,
)
from jaxkfac.interception.coupling._values import (
    QUESTIONS,
    Dependence,
    LabeledValue,
    Question,
    Reason,
    equal_labels,
    joined_values,
    rank_of,
    unknown,
)

MOST_ROUNDS = 20


class Follows(Interpreter[LabeledValue]):
    """The interface of the interpreter for loops and calls."""

    number: int
    next_label: int
    unrolled: int
    shards: list["Columns"]
    rules: dict[tuple[int, ...], Any]

    @abc.abstractmethod
    def as_rows(self, var: VarOrLiteral, out: LabeledValue) -> LabeledValue:
        """A value as rows of a layer."""


class Columns(NamedTuple):
    """Labels that each stand for the labels of one entry over all iterations.

    Attributes:
        first: The first of these labels.
        by_iteration: The labels that they stand for, ``(columns, iterations)``.
    """

    first: int
    by_iteration: np.ndarray

    def standing(self, labels: np.ndarray) -> np.ndarray:
        """A mask of the labels that stand for columns."""
        return (labels >= self.first) & (labels < self.first + len(self.by_iteration))

    def stacked(self, labels: Labels) -> Labels:
        """The labels of all iterations' results, stacked."""
        if labels is None:
            return None
        stands = self.standing(labels)
        if not stands.any():
            # One entry along the iterations stands for all of them; see `columns_of`.
            return labels[None]
        check_size((self.by_iteration.shape[1], *labels.shape))
        column = np.where(stands, labels - self.first, 0)
        over = np.moveaxis(self.by_iteration[column], -1, 0)
        return simplified(np.where(stands, over, labels))

    def carried(self, labels: Labels) -> Labels:
        """The labels of one iteration's results as another iteration sees them."""
        if labels is None:
            return None
        # The label of a column means "the example of this iteration", and the next iteration reads
        # the carry as another example's.
        return np.where(self.standing(labels), np.int32(MIXED), labels)


def columns_of(follower: Follows, all_labels: Sequence[Labels]) -> tuple[Columns, list[Labels]]:
    """Columns of labels whose leading axes are iterations, and the labels in one iteration."""
    varied = [x for x in all_labels if x is not None and x.shape[0] > 1]
    if not varied:
        return Columns(0, np.zeros((0, 1), np.int32)), [
            None if x is None else x[0] for x in all_labels
        ]
    flat = np.concatenate([x.reshape(len(x), -1) for x in varied], 1)
    columns, index = np.unique(flat.T, axis=0, return_inverse=True)
    # A column whose labels are equal in all iterations needs no label of its own, and survives in a
    # carry.
    alike = (columns == columns[:, :1]).all(1)
    first = follower.next_label
    follower.next_label += len(columns)
    stands = np.where(alike, columns[:, 0], first + np.arange(len(columns))).astype(np.int32)
    iteration_labels, at = [], 0
    for x in all_labels:
        if x is None or x.shape[0] == 1:
            iteration_labels.append(None if x is None else x[0])
            continue
        size = x[0].size
        iteration_labels.append(stands[index.ravel()[at : at + size]].reshape(x.shape[1:]))
        at += size
    return Columns(first, columns), iteration_labels


def scan(
    follower: Follows, eqn: Eqn, ins: Sequence[LabeledValue], plan: Plan | None
) -> list[LabeledValue]:
    """The results of a scan."""
    length = eqn.params["length"]
    ins = list(ins)
    # A parameter that is the initial carry is a layer whose rows are the carry's, so it has to be
    # followed as rows before the body sees it.
    for position in {} if plan is None else plan.entries:
        ins[position] = follower.as_rows(eqn.invars[position], ins[position])
    # The budget counts equations, not iterations: nested loops multiply, and following takes time
    # for each equation.
    equations = length * _size_of(body_of(eqn)[0])
    if length > 1 and follower.unrolled < equations:
        return _at_once(follower, eqn, ins, plan)
    if length > 1:
        outs = _at_once(follower, eqn, ins, plan)
        # Unrolling helps only if examples seem to meet inside the loop: a known counter may show
        # that they do not.
        before = [x.of(q).mixed for x in ins for q in QUESTIONS]
        if any(before) or not any(x.of(q).mixed for x in outs for q in QUESTIONS):
            return outs
    follower.unrolled -= equations
    return _one_by_one(follower, eqn, ins, plan)


def _at_once(
    follower: Follows, eqn: Eqn, ins: Sequence[LabeledValue], plan: Plan | None
) -> list[LabeledValue]:
    body, consts = body_of(eqn)
    constants, carries = scan_counts(eqn)
    fixed, carry, xs = _constants_carry_xs(ins, constants, carries)
    columns, slices = slices_of(follower, xs, [x.of(q).labels for x in xs for q in QUESTIONS])
    where = "at `scan`, whose carry goes from example to example"
    # The first value of a counter is known, but not its value in every iteration, which this single
    # run stands for.
    carry = [x._replace(integers=no_integers) for x in carry]
    for _ in range(MOST_ROUNDS):
        outs = follower.run(body, consts, [*fixed, *carry, *slices], plan)
        grown = []
        for before, out in zip(carry, outs[:carries], strict=True):
            # The value is joined with the one before and does not replace it: labels then only
            # grow, which ends the search for a fixed point.
            after = out.with_labels(columns.carried, reason=Reason(True, where))
            grown.append(joined_values(before, after, where=where))
        if all(map(equal_labels, carry, grown)):
            break
        carry = [x._replace(integers=no_integers) for x in grown]
    else:
        # Labels still grow from round to round, so those of the last one prove nothing: neither for
        # the carry nor for the stacked results.
        return [unknown(v, Reason(False, "at `scan`")) for v in eqn.outvars]
    return [*carry, *(x.with_labels(columns.stacked) for x in outs[carries:])]


def slices_of(
    follower: Follows, xs: Sequence[LabeledValue], all_labels: Sequence[Labels]
) -> tuple[Columns, list[LabeledValue]]:
    """Operands as one iteration sees them, for all iterations at once.

    Args:
        follower: The interpreter.
        xs: The operands.
        all_labels: Their labels for each question, stacked along the iterations.
    """
    columns, inside = columns_of(follower, all_labels)
    each = zip(xs, map(iter, zip(inside[::2], inside[1::2], strict=True)), strict=True)
    return columns, [x.with_labels(lambda _, labels=labels: next(labels)) for x, labels in each]


def _one_by_one(
    follower: Follows, eqn: Eqn, ins: Sequence[LabeledValue], plan: Plan | None
) -> list[LabeledValue]:
    """The results of a scan followed iteration by iteration, where counters are known."""
    body, consts = body_of(eqn)
    constants, carries = scan_counts(eqn)
    fixed, carry, xs = _constants_carry_xs(ins, constants, carries)
    length, all_results = eqn.params["length"], []
    # A reversed scan runs from the last slice, but stacks its results in the order of the slices.
    for t in reversed(range(length)) if eqn.params["reverse"] else range(length):
        outs = follower.run(body, consts, [*fixed, *carry, *(_slice(x, t) for x in xs)], plan)
        carry, results = outs[:carries], outs[carries:]
        all_results.append(results)
    if eqn.params["reverse"]:
        all_results.reverse()
    if not length:  # the stacked results have no entries
        return [*carry, *[LabeledValue()] * (len(eqn.outvars) - carries)]
    return [*carry, *(_stack(iterations) for iterations in zip(*all_results, strict=True))]


def _slice(x: LabeledValue, t: int) -> LabeledValue:
    def entry(labels: Labels) -> Labels:
        return None if labels is None else simplified(labels[t if labels.shape[0] > 1 else 0])

    return x.with_labels(entry, integers=_entry(x.integers, t))


def _entry(ask: LazyIntegers, t: int) -> LazyIntegers:
    def integers() -> KnownArray | None:
        array = ask()
        if array is None:
            return None
        return KnownArray(np.asarray(array.values[t]), np.asarray(array.is_known[t]))

    return integers


def _stack(values: Sequence[LabeledValue]) -> LabeledValue:
    def of(question: Question) -> Dependence:
        dependences = [x.of(question) for x in values]
        if all(x.labels is None for x in dependences):
            return Dependence()
        rank = next(x.labels.ndim for x in dependences if x.labels is not None)
        none = np.full((1,) * rank, FREE, np.int32)
        filled = [none if x.labels is None else x.labels for x in dependences]
        check_size((len(filled), *np.broadcast_shapes(*[x.shape for x in filled])))
        # Labels may have length one along an axis that another iteration wrote out, so they are
        # broadcast first.
        labels = simplified(np.stack(np.broadcast_arrays(*filled)))
        return Dependence(
            labels, next((x.reason for x in dependences if x.reason is not None), None)
        )

    value = of("value")
    alike = all(x.value.labels is x.derivative.labels for x in values)
    moved = next((x.moved for x in values if x.moved), "")
    parameter = any(x.parameter for x in values) and value.labels is None
    return LabeledValue(value, value if alike else of("derivative"), parameter, moved=moved)


def _constants_carry_xs(
    ins: Sequence[LabeledValue], constants: int, carries: int
) -> tuple[list[LabeledValue], list[LabeledValue], list[LabeledValue]]:
    split = constants + carries
    return list(ins[:constants]), list(ins[constants:split]), list(ins[split:])


def _size_of(jaxpr: Jaxpr) -> int:
    """The number of equations in a jaxpr and its bodies; a scan counts each iteration."""
    # A `while` counts once: its body is followed a few times only (`MOST_ROUNDS`).
    return sum(1 + num_iterations(eqn) * sum(map(_size_of, jaxprs_in(eqn))) for eqn in jaxpr.eqns)


def while_loop(
    follower: Follows, eqn: Eqn, ins: Sequence[LabeledValue], plan: Plan | None
) -> list[LabeledValue]:
    """The results of a loop of unknown length, which depend on its number of rounds.

    A loop under ``vmap`` has a predicate for each row, which decides for that row alone.
    """
    p = eqn.params
    of_cond, of_body = p["cond_nconsts"], p["body_nconsts"]
    (cond, cond_consts), (body, body_consts) = map(open_jaxpr, (p["cond_jaxpr"], p["body_jaxpr"]))
    fixed, constants = list(ins[:of_cond]), list(ins[of_cond : of_cond + of_body])
    carry = [x._replace(integers=no_integers) for x in ins[of_cond + of_body :]]
    where = "at `while`"
    for _ in range(MOST_ROUNDS):
        # Whether a round runs is decided by the predicate, so every carry depends on what the
        # predicate depends on.
        (again,) = follower.run(cond, cond_consts, [*fixed, *carry])
        outs = follower.run(body, body_consts, [*constants, *carry])
        rounds = again.value._replace(
            reason=Reason(False, "at `while`, whose number of rounds depends on all examples")
            if again.value.labels is not None
            else None
        )
        grown = []
        for var, before, out in zip(eqn.outvars, carry, outs, strict=True):
            labels = rounds.labels
            more = [1] * (rank_of(var) - (0 if labels is None else labels.ndim))
            at_rank = None if labels is None else labels.reshape(*labels.shape, *more)
            # Only the value depends on the predicate: a number of rounds has no derivative.
            when = LabeledValue(rounds._replace(labels=at_rank))
            grown.append(
                joined_values(before, out, when, where=where)._replace(integers=no_integers)
            )
        if all(map(equal_labels, carry, grown)):
            return grown
        carry = grown
    return [unknown(v, Reason(False, where)) for v in eqn.outvars]
