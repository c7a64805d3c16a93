"""Which results of a program are operands of it, handed on unchanged, and which read an operand.

Loops and rematerialised functions of NNX return every variable of a module, written or not, and
its recurrent cells draw keys for zeros: nothing but the program tells what was changed or used.
"""

from collections.abc import Sequence
from typing import Any

from jaxkfac.interception._compat import (
    ClosedJaxpr,
    Eqn,
    Jaxpr,
    body_of,
    call_kind,
    is_var,
    open_jaxpr,
    scan_counts,
)


def passed_through(jaxpr: Jaxpr | ClosedJaxpr) -> list[int | None]:
    """For each result of a program, the operand that it is, or ``None``.

    Through jit, checkpoint, custom derivatives, scan (a carry that no iteration writes, a scanned
    operand that is stacked again) and cond. Anything else may have changed what it returns.
    """
    opened, _ = open_jaxpr(jaxpr)
    source: dict[Any, int | None] = {v: i for i, v in enumerate(opened.invars)}
    for eqn in opened.eqns:
        for var, operand in zip(eqn.outvars, _through(eqn), strict=True):
            if operand is not None and is_var(eqn.invars[operand]):
                source[var] = source.get(eqn.invars[operand])
    return [source.get(v) if is_var(v) else None for v in opened.outvars]


def reading(jaxpr: Jaxpr | ClosedJaxpr, read: Sequence[bool]) -> list[bool]:
    """For each result of a program, whether it may depend on one of the operands marked."""
    opened, _ = open_jaxpr(jaxpr)
    marked = {v for v, mark in zip(opened.invars, read, strict=True) if mark}
    for eqn in opened.eqns:
        into = [is_var(v) and v in marked for v in eqn.invars]
        if any(into):
            marked.update(v for v, out in zip(eqn.outvars, _reading(eqn, into), strict=True) if out)
    return [is_var(v) and v in marked for v in opened.outvars]


def _reading(eqn: Eqn, read: list[bool]) -> list[bool]:
    """For each result of an equation, whether it may depend on one of the operands marked."""
    kind = call_kind(eqn)
    if kind in ("jit", "checkpoint", "custom"):
        return reading(body_of(eqn)[0], read)
    if kind == "cond" and not read[0]:
        branches = [reading(branch, read[1:]) for branch in eqn.params["branches"]]
        return [any(ways) for ways in zip(*branches, strict=True)]
    if kind == "scan":
        constants, carries = scan_counts(eqn)
        while True:  # until no further carry reads one
            out = reading(body_of(eqn)[0], read)
            grown = [a or b for a, b in zip(read[constants : constants + carries], out)]
            if grown == read[constants : constants + carries]:
                return out
            read = [*read[:constants], *grown, *read[constants + carries :]]
    return [True] * len(eqn.outvars)


def _through(eqn: Eqn) -> list[int | None]:
    """For each result of an equation, the operand that it is, or ``None``."""
    kind = call_kind(eqn)
    nothing: list[int | None] = [None] * len(eqn.outvars)
    if kind in ("jit", "checkpoint", "custom"):
        return passed_through(body_of(eqn)[0])
    if kind == "scan":
        constants, carries = scan_counts(eqn)
        found = passed_through(body_of(eqn)[0])
        return [
            i if i is not None and _same_place(out, i, constants, carries) else None
            for out, i in enumerate(found)
        ]
    if kind == "cond":
        branches = [passed_through(branch) for branch in eqn.params["branches"]]
        return [
            ways[0] + 1 if ways[0] is not None and len(set(ways)) == 1 else None
            for ways in zip(*branches, strict=True)
        ]
    return nothing


def _same_place(out: int, operand: int, constants: int, carries: int) -> bool:
    """Whether a result of a scan's body keeps the operand in the form in which it came."""
    if out < carries:
        return operand == constants + out
    return operand >= constants + carries
