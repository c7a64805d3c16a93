"""Which equations the wanted outputs of a program depend on."""

from collections.abc import Callable, Sequence

from jaxkfac.interception._compat import (
    Eqn,
    Jaxpr,
    body_of,
    branches_of,
    call_kind,
    is_var,
    scan_counts,
)


def visit_live(jaxpr: Jaxpr, wanted: Sequence[bool], visit: Callable[[Eqn], None]) -> list[bool]:
    """Visit, last one first, the equations that the wanted outputs depend on.

    Returns:
        Which inputs they depend on.
    """
    needed = {v for v, w in zip(jaxpr.outvars, wanted, strict=True) if w and is_var(v)}
    for eqn in reversed(jaxpr.eqns):
        if needed.isdisjoint(eqn.outvars):
            continue
        wants, kind = [v in needed for v in eqn.outvars], call_kind(eqn)
        visit(eqn)
        reads = [True] * len(eqn.invars)
        if kind == "scan":
            reads = _live_scan(eqn, wants, visit)
        elif kind == "cond":
            each = [visit_live(branch, wants, visit) for branch, _ in branches_of(eqn)]
            reads = [True, *map(any, zip(*each, strict=True))]
        elif kind is not None and kind != "while":
            reads = visit_live(body_of(eqn)[0], wants, visit)
        needed |= {v for v, r in zip(eqn.invars, reads, strict=True) if r and is_var(v)}
    return [v in needed for v in jaxpr.invars]


def _live_scan(eqn: Eqn, wants: list[bool], visit: Callable[[Eqn], None]) -> list[bool]:
    body, (constants, carried) = body_of(eqn)[0], scan_counts(eqn)
    while True:  # a carry that is read makes what it was computed from needed before
        reads = visit_live(body, wants, lambda _: None)
        carries = reads[constants : constants + carried]
        grown = [*map(any, zip(carries, wants[:carried], strict=True)), *wants[carried:]]
        if grown == wants:
            visit_live(body, wants, visit)
            return reads
        wants = grown
