"""Weights that are computed from parameters and are no matrix of them: ``v / norm(v) * g``.

Such a weight is a layer of its own, with the factors of its product, under the name of the largest
parameter in it and ``@effective``. No parameter is preconditioned by them: each parameter behind
the weight has the diagonal of its gradient, from a second pass over the examples.
"""

import math
from collections.abc import Sequence

import jax.numpy as jnp

from jaxkfac.interception._compat import Eqn
from jaxkfac.interception._facts import Facts
from jaxkfac.interception._kind import kind_named, kind_reading
from jaxkfac.interception._propagate import fresh
from jaxkfac.interception._uses import uses_of
from jaxkfac.interception._values import (
    Combined,
    Constant,
    Consumed,
    Data,
    Use,
    Value,
    View,
    traced_indices_in,
    views_in,
)

BEHIND = "reparameterised"  # the kind of a parameter behind such a weight


def uses_in(
    facts: Facts, eqn: Eqn, ins: Sequence[Value], scope: tuple[int, ...]
) -> list[Use] | str:
    """The uses in an equation that reads at least one parameter and some data.

    Returns:
        Uses of what is seen of parameters, of the weight itself where it is computed from them,
        and of each parameter behind it; or the reason why no rule applies.
    """
    if any(jnp.iscomplexobj(v.aval) for v in eqn.invars):
        return uses_of(facts.table, eqn, ins, scope)  # statistics are of real weights
    kind, seen = kind_reading(eqn.primitive.name), list(map(_seen, ins))
    found = uses_of(facts.table, eqn, seen, scope) if any(map(views_in, seen)) else []
    no_rule = isinstance(found, str)
    if kind is None or (no_rule and kind.elementwise):
        return found
    # Where what is seen is no matrix (a kernel behind exp, joined tables), all of it is behind.
    behind = [(k, p) for k, v in enumerate(ins) for p in (_paths(v) if no_rule else _hidden(v))]
    weights = [k for k, v in enumerate(ins) if _paths(v) and (no_rule or _is_computed(v))]
    own = [] if kind.elementwise else [_weight(facts, eqn, ins, k, scope) for k in weights]
    if no_rule and not any(own) and not any(_is_computed(ins[k]) for k in weights):
        return found  # a parameter as it is, where no rule reads one: the signal of a convolution
    uses = [use for each in own for use in each] + ([] if isinstance(found, str) else found)
    data = next(v for v in ins if isinstance(v, Data))
    unseen = kind_named(BEHIND)
    views = [(k, facts.parameters[path]) for k, path in behind]
    return uses + [Use(unseen, eqn, k, view, scope, data=data) for k, view in views]


def _hidden(value: Value) -> tuple[str, ...]:
    """The parameters in a value whose gradient no view of them gives."""
    reasons = getattr(value, "reasons", ())
    functions = [view.path for view in views_in(value) if view.function and reasons]
    return tuple(dict.fromkeys([path for path, _ in reasons] + functions))


def _seen(value: Value) -> Value:
    """What is seen of parameters in a value, beside those that are hidden."""
    hidden = _hidden(value)
    if not hidden:
        return value
    views = tuple(view for view in views_in(value) if view.path not in hidden)
    return Combined(value.number, views) if views else Constant(value.number)


def _is_computed(value: Value) -> bool:
    """Whether no matrix of a parameter is seen in a value of parameters."""
    return all(view.function or view.axes is None for view in views_in(value))


def _weight(
    facts: Facts, eqn: Eqn, ins: Sequence[Value], position: int, scope: tuple[int, ...]
) -> list[Use]:
    """The uses of a weight as a layer of its own; none where it cannot be one."""
    value, kind = ins[position], kind_reading(eqn.primitive.name)
    traced_indices = traced_indices_in([value])
    if kind is None or any(name != "scan" for name, _ in traced_indices):
        return []  # which of a stack it is depends on an index
    table, paths = facts.table, _paths(value)
    own = fresh(table, eqn.invars[position].aval.shape, "parameter")
    scans = [scan for scan in scope if ("scan", scan) in traced_indices]
    stack = [fresh(table, (facts.lengths[scan],), "parameter")[0] for scan in scans]
    steps = tuple(
        Consumed(facts.lengths[scan], atoms, ("scan", scan))
        for scan, atoms in zip(scans, stack, strict=True)
    )
    largest = max(paths, key=lambda path: _size(facts, path))
    new = View(
        value.number, f"{largest}@effective", (*stack, *own), own, consumed=steps,
        uncut=(*stack, *own), computed_from=paths,
    )  # fmt: skip
    view = facts.computed.setdefault((value.number, tuple(scans)), new)
    uses = kind.find(table, eqn, [*ins[:position], view, *ins[position + 1 :]], [position], scope)
    return [] if isinstance(uses, str) else uses


def _paths(value: Value) -> tuple[str, ...]:
    views = [path for view in views_in(value) for path in paths_of(view)]
    return tuple(sorted({*views, *(path for path, _ in getattr(value, "reasons", ()))}))


def paths_of(view: View) -> tuple[str, ...]:
    """The parameters that a view is of: several where they were stacked for a scan."""
    return tuple(dict.fromkeys((view.path, *(member.path for member in view.members))))


def _size(facts: Facts, path: str) -> int:
    return math.prod(
        map(facts.table.size, (a for axis in facts.parameters[path].origin for a in axis))
    )
