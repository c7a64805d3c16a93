"""Calls with their own rules: custom derivatives, linear solves, Pallas kernels.

For a custom derivative, the question about derivatives is answered from its own program, because
the rule may mix examples that the function does not mix, and the reverse.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex

from jaxkfac._jaxpr_compat import Eqn, Var, body_of, is_var, open_jaxpr
from jaxkfac.interception._custom import is_rule, operands_of, rule_of
from jaxkfac.interception._plan import Plan
from jaxkfac.interception.coupling._labels import FREE, Labels, joined, reduced, simplified
from jaxkfac.interception.coupling._loops import Follows, scan, while_loop
from jaxkfac.interception.coupling._shards import collective, shard_map
from jaxkfac.interception.coupling._values import (
    QUESTIONS,
    Dependence,
    LabeledValue,
    Reason,
    first_reason,
    is_inexact,
    joined_examples,
    joined_values,
    unknown,
)

COLLECTIVES = frozenset(
    "psum psum2 psum_invariant pmax pmin ppermute all_gather all_gather_invariant all_to_all "
    "reduce_scatter psum_scatter pgather".split()
)
MOST_BLOCKS = 4096


def custom(
    follower: Follows, eqn: Eqn, ins: Sequence[LabeledValue], plan: Plan | None
) -> list[LabeledValue]:
    """The results of a function with a custom derivative."""
    outs = follower.run(*body_of(eqn), ins)
    at = {id(v): x for v, x in zip(eqn.invars, ins, strict=True) if is_var(v)}
    # A rule lets examples meet in the tangents of values that have a derivative in examples. Those
    # of parameters are rows of layers in a `custom_jvp`; a `custom_vjp` has its rows in the primal.
    moving = [
        v
        for v in operands_of(eqn)[1]
        if at[id(v)].derivative.labels is not None or (is_rule(eqn) and at[id(v)].parameter)
    ]
    if not moving or not any(map(is_inexact, eqn.outvars)):
        return outs
    of_rule = _tangents if is_rule(eqn) else _cotangents
    try:
        return of_rule(follower, eqn, at, outs, moving)
    except Exception as error:  # a rule that cannot be followed proves nothing
        name = eqn.primitive.name
        reason = Reason(False, f"in the rule of `{name}`, which is not followed: {error!r:.200}")
        return [x._replace(derivative=unknown(v, reason).derivative) for v, x in _both(eqn, outs)]


def _both(eqn: Eqn, outs: Sequence[LabeledValue]) -> list[tuple[Var, LabeledValue]]:
    return list(zip(eqn.outvars, outs, strict=True))


def _tangents(
    follower: Follows,
    eqn: Eqn,
    at: Mapping[int, LabeledValue],
    outs: Sequence[LabeledValue],
    moving: Sequence[Var],
) -> list[LabeledValue]:
    """The results of a ``custom_jvp``; its rule gives the examples in their derivatives."""
    closed = _program(follower, eqn, moving, forward=True)
    # The operands themselves are fixed, and parameters among them are constants: a rule that calls
    # its own function again would otherwise be followed without end.
    inside = [
        at[id(v)]._replace(derivative=Dependence(), parameter=False) for v in operands_of(eqn)[0]
    ]
    # The tangent of an operand is a value here: what it depends on is what the operand's derivative
    # depends on.
    inside += [
        LabeledValue(x.derivative, x.derivative, x.parameter) for x in (at[id(v)] for v in moving)
    ]
    rule = iter(follower.run(closed.jaxpr, closed.consts, inside))
    reason, results = Reason(True, f"in the rule of `{eqn.primitive.name}`"), []
    for var, out in _both(eqn, outs):
        if is_inexact(var):
            derivative = joined_examples(out.derivative, next(rule).derivative, reason=reason)
            out = out._replace(derivative=derivative)
        results.append(out)
    return results


def _cotangents(
    follower: Follows,
    eqn: Eqn,
    at: Mapping[int, LabeledValue],
    outs: Sequence[LabeledValue],
    moving: Sequence[Var],
) -> list[LabeledValue]:
    """The results of a ``custom_vjp``.

    The rule is followed forward and backward, with cotangents that have the labels of the results.
    An operand's cotangent must then have, in each entry, the label of that entry; otherwise the
    rule mixes examples.
    """
    closed = _program(follower, eqn, moving, forward=False)
    # If it is unknown whether a result mixes examples, the same is unknown of its cotangent.
    owners = [
        Dependence(
            _one_or_other(x.derivative.labels, x.value.labels),
            first_reason([x.derivative, x.value]),
        )
        for v, x in _both(eqn, outs)
        if is_inexact(v)
    ]
    inside = [at[id(v)]._replace(derivative=Dependence()) for v in operands_of(eqn)[0]]
    inside += [LabeledValue(x, x) for x in owners]
    backward, reason = follower.run(closed.jaxpr, closed.consts, inside), None
    for var, back in zip(moving, backward, strict=True):
        operand_labels, labels = at[id(var)].derivative.labels, back.derivative.labels
        # FREE on either side is no contradiction: such an entry has no example, or the rule sends
        # it no cotangent.
        if operand_labels is not None and labels is not None and _unlike(operand_labels, labels):
            where = Reason(True, f"in the rule of `{eqn.primitive.name}`")
            reason = reason or back.derivative.reason or where
    if reason is None:
        return list(outs)
    return [x._replace(derivative=unknown(v, reason).derivative) for v, x in _both(eqn, outs)]


def _program(follower: Follows, eqn: Eqn, moving: Sequence[Var], *, forward: bool) -> Any:
    """The program of a function's tangents, or of its operands' cotangents.

    Args:
        follower: Caches the programs.
        eqn: The call.
        moving: The operands that have tangents. A rule may refuse tangents of others.
        forward: Whether it is the program of the tangents.
    """
    # A loop follows its body several times, and tracing a rule takes longer than following it.
    key = (id(eqn), *map(id, moving))
    if key not in follower.rules:  # with the equation: its id is unique only while it lives
        follower.rules[key] = eqn, rule_of(eqn, moving, forward=forward)
    return follower.rules[key][1]


def _one_or_other(first: Labels, second: Labels) -> Labels:
    """The first labels, with the second ones where the first are ``FREE``."""
    if first is None or second is None:
        return second if first is None else first
    return np.where(first == FREE, second, first)


def _unlike(first: np.ndarray, second: np.ndarray) -> bool:
    return bool(((first != second) & (first != FREE) & (second != FREE)).any())


def linear_solve(
    follower: Follows, eqn: Eqn, ins: Sequence[LabeledValue], plan: Plan | None
) -> list[LabeledValue]:
    """The results of ``custom_linear_solve``: its solver, and the derivative of its product."""
    lengths, jaxprs = eqn.params["const_lengths"], eqn.params["jaxprs"]
    sizes = [lengths.matvec, lengths.vecmat, lengths.solve, lengths.transpose_solve]
    ends = np.cumsum(sizes)
    of_matvec, of_solve = list(ins[: ends[0]]), list(ins[ends[1] : ends[2]])
    right = list(ins[ends[3] :])
    matvec, solve = jaxprs.matvec, jaxprs.solve
    outs = follower.run(*open_jaxpr(solve), [*of_solve, *right])
    # The derivative solves for b' - A' x; the solver's own constants are fixed.
    number = len(right)
    rows = follower.run(*open_jaxpr(matvec), [*of_matvec, *outs[:number]])
    right = [joined_values(b, r, where="at `custom_linear_solve`") for b, r in zip(right, rows)]
    again = follower.run(*open_jaxpr(solve), [*of_solve, *right])
    reason = Reason(True, "at `custom_linear_solve`")
    return [
        LabeledValue(
            out.value,
            joined_examples(out.derivative, twice.derivative, reason=reason),
            moved=out.moved,
        )
        for out, twice in zip(outs, again, strict=True)
    ]


def pallas(
    follower: Follows, eqn: Eqn, ins: Sequence[LabeledValue], plan: Plan | None
) -> list[LabeledValue]:
    """The results of a Pallas kernel: a step of the grid writes a block from the operands' blocks.

    The kernel is not followed: a block that contains several examples mixes them.
    """
    mapping = eqn.params["grid_mapping"]
    blocks, grid = list(mapping.block_mappings), tuple(mapping.grid)
    # With scalars that are prefetched, the blocks depend on values that a trace does not have.
    plain = all(isinstance(n, int) for n in grid) and not getattr(mapping, "num_index_operands", 0)
    plain = plain and all(map(_is_numbered, blocks))
    number = len(ins)
    reason = Reason(False, "at `pallas_call`")
    if not plain or len(blocks) != number + len(eqn.outvars) or np.prod(grid) > MOST_BLOCKS:
        return [unknown(v, reason) for v in eqn.outvars]
    steps = list(np.ndindex(*grid))
    places = [[_block(b, step) for step in steps] for b in blocks]
    has_scratch = bool(getattr(mapping, "scratch_avals", ()))
    groups = [range(len(steps))] if has_scratch else _steps_with_one_block(places[number:])
    aliased = {k: i for i, k in eqn.params.get("input_output_aliases", ())}
    results: list[list[Dependence]] = [[] for _ in eqn.outvars]
    for question in QUESTIONS:
        operands = [x.of(question) for x in ins]
        of_steps = [
            joined(*[_of_block(x, v, at[s]) for x, v, at in zip(operands, eqn.invars, places)])
            for s in range(len(steps))
        ]
        _share(of_steps, groups)
        why = first_reason(operands)
        for k, var in enumerate(eqn.outvars):
            labels = np.full(var.aval.shape, FREE, np.int32)
            # A block that no step writes keeps what the operand in the same memory holds.
            if k in aliased and (before := operands[aliased[k]].labels) is not None:
                labels = np.broadcast_to(before, labels.shape).copy()
            for place, block in zip(places[number + k], of_steps, strict=True):
                if block is not None:
                    # Several steps may write one block, each from other operands, so labels are
                    # joined and not replaced.
                    labels[place] = joined(
                        labels[place], np.broadcast_to(block, labels[place].shape)
                    )
            out = Dependence(simplified(labels), why)
            results[k].append(out._replace(reason=reason) if why is None and out.mixed else out)
    return [LabeledValue(value, derivative) for value, derivative in results]


def _of_block(x: Dependence, var: Var, place: tuple[slice, ...]) -> Labels:
    """One label for a block of an operand."""
    if x.labels is None:
        return None
    label = reduced(block := np.broadcast_to(x.labels, var.aval.shape)[place], range(block.ndim))
    return label.reshape(())


def _steps_with_one_block(places: Sequence[Sequence[tuple[slice, ...]]]) -> list[Sequence[int]]:
    """The groups of steps that have one block of a result in common."""
    groups = collections.defaultdict(list)
    for k, of_result in enumerate(places):
        for s, place in enumerate(of_result):
            groups[k, *((at.start, at.stop) for at in place)].append(s)
    return [group for group in groups.values() if len(group) > 1]


def _share(of_steps: list[Labels], groups: Sequence[Sequence[int]]) -> None:
    """Give the steps of a group one label, because memory that they share outlives a step.

    A step may read there what an earlier one wrote, such as a running sum.
    """
    grown = True
    while grown:
        grown = False
        for group in groups:
            label = joined(*[of_steps[s] for s in group])
            for s in group:
                grown |= not np.array_equal(of_steps[s], label)  # pyright: ignore
                of_steps[s] = label


def _is_numbered(mapping: Any) -> bool:
    """Whether an index map counts blocks, and not entries (``pl.Element``)."""
    names = {type(size).__name__ for size in mapping.block_shape}
    return names <= {"int", "NoneType", "Blocked", "Squeezed", "Mapped"}


def _block(mapping: Any, step: tuple[int, ...]) -> tuple[slice, ...]:
    """The entries of an operand that one step of the grid reads."""
    with jax.ensure_compile_time_eval():
        index = jex.jaxpr_as_fun(mapping.index_map_jaxpr)(*map(np.int32, step))
    out = []
    for size, at in zip(mapping.block_shape, index, strict=True):
        size = int(getattr(size, "block_size", size if isinstance(size, int) else 1))
        out.append(slice(int(at) * size, (int(at) + 1) * size))
    return tuple(out)


Into = Callable[[Follows, Eqn, Sequence[LabeledValue], "Plan | None"], "list[LabeledValue]"]
CALLS: dict[str, Into] = {
    "scan": scan,
    "while": while_loop,
    "shard_map": shard_map,
    "custom": custom,
    "custom_linear_solve": linear_solve,
    "pallas_call": pallas,
} | dict.fromkeys(COLLECTIVES, collective)
