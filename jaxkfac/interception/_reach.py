"""Which layer uses lead to which outputs of a program."""

from collections.abc import Collection, Iterable

from jaxkfac.interception._compat import call_kind, is_var, scan_counts
from jaxkfac.interception._plan import Plan
from jaxkfac.interception._values import Use


def leading_to(
    plan: Plan, *outputs: int, past: Collection[int] = ()
) -> tuple[list[Use], frozenset[int]]:
    """The uses that some outputs depend on, and the inputs.

    ``past`` are inputs that functions with a derivative of their own read: what leads to an output
    through one of these does not count.
    """
    uses: dict[int, Use] = {}
    inputs = _inputs(plan, outputs, uses, past)
    return list(uses.values()), frozenset(inputs)


def _inputs(
    plan: Plan, outputs: Iterable[int], uses: dict[int, Use], past: Collection[int] = ()
) -> set[int]:
    """Positions of the inputs that some outputs depend on; uses on the way are noted."""
    jaxpr = plan.jaxpr
    walls = {jaxpr.invars[k] for k in past}
    live = {v for k in outputs if is_var(v := jaxpr.outvars[k])}
    for position in range(len(jaxpr.eqns) - 1, -1, -1):
        eqn = jaxpr.eqns[position]
        wanted = {k for k, v in enumerate(eqn.outvars) if v in live}
        if not wanted or eqn.primitive.name == "stop_gradient":
            continue
        within = [k for k, v in enumerate(eqn.invars) if is_var(v) and v in walls]
        if within and call_kind(eqn) == "custom":
            continue
        uses.update((id(use), use) for use in plan.uses.get(position, ()))
        read = set(range(len(eqn.invars)))
        if position in plan.calls:
            inner, kind = plan.calls[position], call_kind(eqn)
            uses.update((id(use), use) for use in inner.entries.values())
            if kind == "scan":
                read = _inputs_of_scan(inner, *scan_counts(eqn), wanted, uses)
            elif kind == "cond":
                branches = [_inputs(branch, wanted, uses) for branch in inner.calls.values()]
                read = {0}.union(*({k + 1 for k in operands} for operands in branches))
            elif kind == "custom":  # a rule has other operands and results than its function
                uses.update((id(use), use) for use in inner.all_uses())
            else:
                read = _inputs(inner, wanted, uses, within)
        live |= {v for k in read if is_var(v := eqn.invars[k])}
    return {k for k, v in enumerate(jaxpr.invars) if v in live}


def _inputs_of_scan(
    body: Plan, constants: int, carries: int, wanted: set[int], uses: dict[int, Use]
) -> set[int]:
    """Of a scan: a carry that an iteration reads is one that the iteration before returns."""
    while True:
        read = _inputs(body, wanted, uses)
        more = {k - constants for k in read if constants <= k < constants + carries}
        if more <= wanted:
            return read
        wanted = wanted | more
