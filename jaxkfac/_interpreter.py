"""One interpreter of jaxprs: every walk over a program is a set of rules for it.

``Interpreter`` goes forward, over values of any kind: arrays (the program is emitted again), axes,
labels, sizes. ``Replacer`` emits a program in which some equations are replaced. ``live_inputs``
goes back from results. How a structured equation is entered is written here and in
``_jaxpr_compat``, once.
"""

import abc
import collections
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import jax
import numpy as np

from jaxkfac._jaxpr_compat import (
    Eqn,
    Jaxpr,
    Var,
    VarOrLiteral,
    bodies_of,
    call_kind,
    checkpoint_like,
    equation_signature,
    evaluate,
    is_var,
    num_selectors,
    scan_counts,
    scan_like,
)

V = TypeVar("V")

# ---------------- the steps of a program: single equations, and runs of ordinary ones between them
#
# A run is one function that is built once and evaluated without change. Emission therefore costs
# time in proportion to the equations that are treated, not to the length of the program.


@dataclasses.dataclass(frozen=True)
class Segment:
    """A run of equations that need no special treatment."""

    run: Callable[..., list[Any]]
    invars: list[Var]
    outvars: list[Var]
    eqns: list[Eqn]

    def reader_of(self, var: Var) -> str:
        """The first equation that reads a variable, for messages."""
        eqn = next(e for e in self.eqns if any(v is var for v in e.invars))
        inner = eqn.params.get("name")
        name = eqn.primitive.name
        return f"`{name}` (of `{inner}`)" if isinstance(inner, str) else f"`{name}`"


def steps_of(jaxpr: Jaxpr, is_special: Callable[[int, Eqn], bool]) -> list[Segment | int]:
    """A program as runs of ordinary equations and positions of special ones."""
    runs: list[list[int] | int] = []
    for position, eqn in enumerate(jaxpr.eqns):
        if is_special(position, eqn):
            runs.append(position)
        elif runs and isinstance(runs[-1], list):
            runs[-1].append(position)
        else:
            runs.append([position])
    needed = {v for v in jaxpr.outvars if is_var(v)}
    steps: list[Segment | int] = []
    for run in reversed(runs):
        eqns = [jaxpr.eqns[p] for p in (run if isinstance(run, list) else [run])]
        written = {v: None for e in eqns for v in e.outvars}
        read = {v: None for e in eqns for v in e.invars if is_var(v)}
        if isinstance(run, list):
            outvars = [v for v in written if v in needed]
            invars = [v for v in read if v not in written]
            run_eqns = evaluate(eqns, invars, outvars, jaxpr)
            steps.append(Segment(run_eqns, invars, outvars, eqns))
        else:
            steps.append(run)
        needed = (needed - written.keys()) | read.keys()
    return steps[::-1]


def with_shared_runs(steps: Sequence[Segment | int]) -> list[Segment | int]:
    """The steps, in which equal segments are one function, as in the layers of a decoder.

    JAX then differentiates it once and not once for each layer. It is inlined where it is called,
    so the program that comes out is the same. Segments in different ``jax.named_scope`` are not
    equal: in a profile, all of them would have the names of the first.
    """
    signatures = {k: _signature(x) for k, x in enumerate(steps) if isinstance(x, Segment)}
    number, shared = collections.Counter(signatures.values()), {}

    def of(position: int, step: Segment | int) -> Segment | int:
        signature = signatures.get(position)
        if signature is None or isinstance(step, int) or number[signature] == 1:
            return step
        run = shared.setdefault(signature, jax.jit(step.run, inline=True))
        return dataclasses.replace(step, run=run)

    return [of(position, step) for position, step in enumerate(steps)]


def _signature(segment: Segment) -> Hashable:
    """A key for what a segment does, whatever its variables are called; ``None`` with effects."""
    if any(eqn.effects for eqn in segment.eqns):
        return None
    numbers: dict[Var, int] = {}

    def key(operand: VarOrLiteral) -> Hashable:
        if is_var(operand):
            return numbers.setdefault(operand, len(numbers))
        return operand.aval, np.asarray(operand.val).tobytes()

    inputs = tuple((key(v), v.aval) for v in segment.invars)
    equations = tuple(
        (
            equation_signature(eqn),
            str(eqn.source_info.name_stack),
            *map(key, eqn.invars),
            *map(key, eqn.outvars),
        )
        for eqn in segment.eqns
    )
    return inputs, equations, tuple(map(key, segment.outvars))


# ---------------- forward


class Interpreter(abc.ABC, Generic[V]):
    """Runs a program over values of any kind."""

    def constant(self, operand: VarOrLiteral, value: Any) -> V:
        """The value of a literal, or of a constant of a jaxpr; itself by default."""
        return value

    @abc.abstractmethod
    def equation(self, eqn: Eqn, ins: list[V], position: int, within: Any) -> Sequence[V]:
        """The values of the results of an equation."""

    def steps(self, jaxpr: Jaxpr, within: Any) -> Iterable[Segment | int]:
        """The positions of the equations, or some of them and segments in place of the others."""
        return range(len(jaxpr.eqns))

    def segment(self, segment: Segment, ins: list[V]) -> Sequence[V]:
        """The values of the results of a segment."""
        return segment.run(*ins)

    def run(
        self, jaxpr: Jaxpr, consts: Sequence[Any], ins: Sequence[V], within: Any = None
    ) -> list[V]:
        """The values of the results of a jaxpr; ``within`` is passed on to each equation."""
        env: dict[Var, V] = dict(zip(jaxpr.invars, ins, strict=True))
        for var, value in zip(jaxpr.constvars, consts, strict=True):
            env[var] = self.constant(var, value)

        def read(operand: VarOrLiteral) -> V:
            return env[operand] if is_var(operand) else self.constant(operand, operand.val)

        for step in self.steps(jaxpr, within):
            if isinstance(step, Segment):
                outvars, outs = step.outvars, self.segment(step, [env[v] for v in step.invars])
            else:
                eqn = jaxpr.eqns[step]
                outvars = eqn.outvars
                outs = self.equation(eqn, [read(v) for v in eqn.invars], step, within)
            env.update(zip(outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]


class Replacer(Interpreter[Any]):
    """Emits a program again, with some equations replaced; the others run in segments."""

    @abc.abstractmethod
    def touches(self, eqn: Eqn) -> bool:
        """Whether an equation is replaced, or holds one that is."""

    @abc.abstractmethod
    def replaced(self, eqn: Eqn, values: list[Any]) -> Sequence[Any]:
        """The results of such an equation."""

    def steps(self, jaxpr: Jaxpr, within: Any) -> Iterable[Segment | int]:
        return steps_of(jaxpr, lambda _, eqn: self.touches(eqn))

    def equation(self, eqn: Eqn, ins: list[Any], position: int, within: Any) -> Sequence[Any]:
        # The equation may have been traced in another context than this one, such as `enable_x64`.
        with eqn.ctx.manager:
            return self.replaced(eqn, ins)


# ---------------- bodies that are run by another function


def run_in_place(eqn: Eqn, body: Callable[..., Any], values: Sequence[Any]) -> Any:
    """The results of a jit or a checkpoint whose body is another function; a jit is expanded."""
    return (checkpoint_like(eqn, body) if call_kind(eqn) == "checkpoint" else body)(*values)


def run_scan(
    eqn: Eqn,
    body: Callable[..., Sequence[Any]],
    values: Sequence[Any],
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda step: step,
) -> list[Any]:
    """The results of a scan whose body is another function of the same operands.

    Args:
        eqn: The scan.
        body: Its body, a function of constants, carries and slices.
        values: Its operands.
        wrap: A transformation of one iteration, such as ``jax.checkpoint``.
    """
    constants, carries = scan_counts(eqn)

    def step(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        out = body(*values[:constants], *carry, *xs)
        return list(out[:carries]), list(out[carries:])

    split = constants + carries
    last, stacked = scan_like(eqn, wrap(step), list(values[constants:split]), list(values[split:]))
    return [*last, *stacked]


# ---------------- all equations


def equations_in(
    eqns: Iterable[Eqn], enters: Callable[[Eqn], bool] = lambda _: True
) -> Iterator[Eqn]:
    """The equations, each followed by those inside it if it is entered."""
    for eqn in eqns:
        yield eqn
        for body, _ in bodies_of(eqn) if enters(eqn) else ():
            yield from equations_in(body.eqns, enters)


# ---------------- back: the inputs on which outputs depend

OperandsRead = Callable[[int, Eqn, set[int]], Iterable[int] | None]
InputsOf = Callable[[set[int]], set[int]]
"""Positions of the inputs of a jaxpr on which some of its outputs depend."""


def live_inputs(jaxpr: Jaxpr, outputs: Iterable[int], operands_read: OperandsRead) -> set[int]:
    """Positions of the inputs on which some outputs depend.

    Args:
        jaxpr: The jaxpr.
        outputs: Positions of the outputs.
        operands_read: Called with the position of an equation, the equation, and the positions of
            its results that are needed; returns the positions of the operands that they depend on,
            or ``None`` to enter the equation. Equations without a needed result are left out, and
            the last one comes first.
    """
    live = {v for k in outputs if is_var(v := jaxpr.outvars[k])}
    for position in range(len(jaxpr.eqns) - 1, -1, -1):
        eqn = jaxpr.eqns[position]
        if results := {k for k, v in enumerate(eqn.outvars) if v in live}:
            operands = operands_read(position, eqn, results)
            if operands is None:
                bodies = [
                    functools.partial(live_inputs, body, operands_read=operands_read)
                    for body, _ in bodies_of(eqn)
                ]
                operands = operands_of_call(eqn, results, bodies)
            live |= {v for k in operands if is_var(v := eqn.invars[k])}
    return {k for k, v in enumerate(jaxpr.invars) if v in live}


def operands_of_call(eqn: Eqn, results: set[int], bodies: Sequence[InputsOf]) -> Iterable[int]:
    """Operands on which some results of an equation depend.

    Args:
        eqn: The equation.
        results: Positions of its results.
        bodies: The dependence of its body, or of each branch of a cond.
    """
    if call_kind(eqn) in (None, "while"):  # any carry may decide whether a `while` runs on
        return range(len(eqn.invars))
    first, (constants, carries) = num_selectors(eqn), scan_counts(eqn)
    while True:
        # Which branch runs is not known, so an operand counts if any branch reads it.
        operands = set(range(first)).union(*({k + first for k in f(results)} for f in bodies))
        # A carry that one iteration reads is a result of the one before.
        more = {k - constants for k in operands if constants <= k < constants + carries}
        if more <= results:
            return operands
        results = results | more
