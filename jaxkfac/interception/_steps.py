"""The steps of a plan: equations that something happens in, and between them runs of the others.

A run is one function, made once and evaluated as it is. So emission costs what the uses, views
and calls cost, not what the program is long.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxkfac.interception import _compat
from jaxkfac.interception._compat import Eqn, Var
from jaxkfac.interception._plan import Plan
from jaxkfac.interception._values import Use


@dataclasses.dataclass(frozen=True)
class Segment:
    """A run of equations that nothing special happens in."""

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


def steps_of(plan: Plan, encoded: frozenset[str]) -> list[Segment | int]:
    """The plan as untouched segments and positions of special equations; computed once."""
    if plan.steps is None:
        plan.steps = _split(plan, encoded)
    return plan.steps


def _split(plan: Plan, encoded: frozenset[str]) -> list[Segment | int]:
    jaxpr = plan.jaxpr

    def is_special(use: Use) -> bool:
        return use.layer is not None or use.view.path in encoded

    special = {p for p, uses in plan.uses.items() if any(map(is_special, uses))}
    special |= plan.views.keys() | plan.marks.keys()
    special |= {
        p for p, c in plan.calls.items() if c.exports_views or any(map(is_special, c.all_uses()))
    }
    runs: list[list[int] | int] = []
    for position in range(len(jaxpr.eqns)):
        if position in special:
            runs.append(position)
        elif runs and isinstance(runs[-1], list):
            runs[-1].append(position)
        else:
            runs.append([position])
    needed = {v for v in jaxpr.outvars if _compat.is_var(v)}
    steps: list[Segment | int] = []
    for run in reversed(runs):
        eqns = [jaxpr.eqns[p] for p in (run if isinstance(run, list) else [run])]
        made = {v: None for e in eqns for v in e.outvars}
        read = {v: None for e in eqns for v in e.invars if _compat.is_var(v)}
        if isinstance(run, list):
            outvars = [v for v in made if v in needed]
            invars = [v for v in read if v not in made]
            run_eqns = _compat.evaluate(eqns, invars, outvars, jaxpr)
            steps.append(Segment(run_eqns, invars, outvars, eqns))
        else:
            steps.append(run)
        needed = (needed - made.keys()) | read.keys()
    return steps[::-1]
