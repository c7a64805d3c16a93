"""Uses: equations in which a parameter meets data, read by the kind for their primitive."""

import math
from collections.abc import Sequence

from jaxkfac._jaxpr_compat import Eqn, is_complex, is_layer
from jaxkfac.interception._kind import (
    Data,
    Kind,
    Scope,
    Use,
    UseSite,
    Value,
    kind_named,
    kind_reading,
)
from jaxkfac.interception._plan import Facts
from jaxkfac.interception.values._axes import AxisTable, fresh
from jaxkfac.interception.values._values import (
    Combined,
    Constant,
    Consumed,
    Parameter,
    View,
    ViewSource,
    traced_indices_in,
    views_in,
)


def uses_of(table: AxisTable, eqn: Eqn, ins: Sequence[Value], scope: Scope) -> list[Use] | str:
    """The uses in an equation that reads at least one view and some data.

    Returns:
        One use per parameter operand, or the reason why no rule applies.
    """
    name = eqn.primitive.name
    kind = kind_reading(name)
    positions = [i for i, v in enumerate(ins) if views_in(v)]
    if len(positions) != 1 and not (kind is not None and kind.inserts):
        return f"meets another parameter in `{name}`"
    if kind is None:
        return f"is read by `{name}`, for which there is no rule"
    all_uses: list[Use] = []
    for position in positions:
        for view in views_in(ins[position]):
            alone = [*ins[:position], view, *ins[position + 1 :]]
            use = _use_of(kind, table, UseSite(eqn, position, scope), alone)
            if isinstance(use, str):
                return use
            all_uses.append(use)
    return all_uses


def _use_of(kind: Kind, table: AxisTable, at: UseSite, ins: Sequence[Value]) -> Use | str:
    """The use of one view by a kind, or by one of those that the kind names in its place."""
    view, name = ins[at.operand], at.eqn.primitive.name
    candidates = [kind]
    if isinstance(view, View) and view.picked is not None:
        if kind.reads.unless_one is None:
            return f"is picked row by row and read by `{name}`, which is no product"
        candidates = [kind_named(kind.reads.unless_one)]
    if kind.reads.unless_matrix is not None:
        candidates.append(kind_named(kind.reads.unless_matrix))
    reasons = []
    for candidate in candidates:
        if is_complex(at.eqn.outvars[0]) and not candidate.reads.complex:
            reasons.append(
                f"meets complex numbers in `{name}`, of which a {candidate.name!r} layer has no "
                "rows: multiply their real and imaginary parts apart"
            )
            continue
        use = candidate.find(table, at, ins)
        if not isinstance(use, str):
            return use
        reasons.append(use)
    return reasons[0]


# ---------------- weights that are computed from parameters, such as ``v / norm(v) * g``
#
# A weight that is no matrix of its parameters is a layer of its own. It has the factors of its
# product and the name of its largest parameter followed by ``@effective``. These factors
# precondition no parameter: each parameter behind the weight has the diagonal of its gradient, from
# a second pass over the examples.


BEHIND = "reparameterised"  # the kind of a parameter behind such a weight


def uses_in(facts: Facts, eqn: Eqn, ins: Sequence[Value], scope: Scope) -> list[Use] | str:
    """The uses in an equation that reads at least one parameter and some data.

    Returns:
        Uses of the parameters that are seen, of the weight if it is computed from some, and of each
        parameter behind it; or the reason why no rule applies.
    """
    if is_layer(eqn):
        return _uses_of_each(facts, eqn, ins, scope)
    return _seen_or_computed(facts, eqn, ins, scope)


def _uses_of_each(facts: Facts, eqn: Eqn, ins: Sequence[Value], scope: Scope) -> list[Use]:
    """The uses in a layer that its user named, of each parameter by itself.

    A parameter that the kind of the layer refuses is reported, and the others keep their uses.
    """
    uses: list[Use] = []
    for k, value in enumerate(ins):
        if not isinstance(value, Parameter):
            continue
        alone = [
            Constant(v.number) if i != k and isinstance(v, Parameter) else v
            for i, v in enumerate(ins)
        ]
        if _is_computed(value):
            found = _seen_or_computed(facts, eqn, alone, scope)
        else:  # a matrix is none that others hide behind: what refuses it refuses the parameter
            found = uses_of(facts.table, eqn, alone, scope)
        if isinstance(found, str):
            facts.report(value, found)
        else:
            uses += found
    return uses


def _seen_or_computed(
    facts: Facts, eqn: Eqn, ins: Sequence[Value], scope: Scope
) -> list[Use] | str:
    """Uses of the parameters that are seen, and of the weights that are computed from some."""
    kind, visible = kind_reading(eqn.primitive.name), list(map(_without_hidden, ins))
    view_uses = uses_of(facts.table, eqn, visible, scope) if any(map(views_in, visible)) else []
    no_rule = isinstance(view_uses, str)
    if kind is None or (no_rule and kind.elementwise):
        return view_uses
    # If the visible views form no matrix (a kernel behind exp, joined tables), all parameters of
    # the operands count as behind the weight.
    behind = [(k, p) for k, v in enumerate(ins) for p in (_paths(v) if no_rule else _hidden(v))]
    weights = [k for k, v in enumerate(ins) if _paths(v) and (no_rule or _is_computed(v))]
    at = [UseSite(eqn, k, scope) for k in weights if not kind.elementwise]
    weight_uses = [use for site in at if (use := _weight(facts, site, ins)) is not None]
    if no_rule and not weight_uses and not any(_is_computed(ins[k]) for k in weights):
        return view_uses  # an uncomputed parameter that no rule reads: a convolution's signal
    uses = weight_uses + ([] if isinstance(view_uses, str) else view_uses)
    data = next(v for v in ins if isinstance(v, Data))
    unseen = kind_named(BEHIND)
    views = [(k, facts.parameters[path]) for k, path in behind]
    return uses + [Use(unseen, view, UseSite(eqn, k, scope), data) for k, view in views]


def _hidden(value: Value) -> tuple[str, ...]:
    """The parameters in a value whose gradient cannot be had from a view of them."""
    reasons = getattr(value, "reasons", ())
    functions = [view.source.path for view in views_in(value) if view.history.function and reasons]
    return tuple(dict.fromkeys([path for path, _ in reasons] + functions))


def _without_hidden(value: Value) -> Value:
    """The value with only those parameters that are seen and not hidden."""
    hidden = _hidden(value)
    if not hidden:
        return value
    views = tuple(view for view in views_in(value) if view.source.path not in hidden)
    return Combined(value.number, views) if views else Constant(value.number)


def _is_computed(value: Value) -> bool:
    """Whether a value of parameters shows no matrix of any of them."""
    return all(view.history.function or view.axes is None for view in views_in(value))


def _weight(facts: Facts, at: UseSite, ins: Sequence[Value]) -> Use | None:
    """The use of a weight as a layer of its own; ``None`` if it cannot be one."""
    value, kind = ins[at.operand], kind_reading(at.eqn.primitive.name)
    operand = at.eqn.invars[at.operand]
    traced_indices = traced_indices_in([value])
    # An index decides which entry of a stack it is; and factors of a complex weight are none of its
    # parameters.
    indexed = any(name != "scan" for name, _ in traced_indices)
    if kind is None or indexed or is_complex(operand):
        return None
    table, paths = facts.table, _paths(value)
    weight_axes = fresh(table, operand.aval.shape, "parameter")
    scans = [scan for scan in at.scope.scans if ("scan", scan) in traced_indices]
    stack = [fresh(table, (facts.lengths[scan],), "parameter")[0] for scan in scans]
    steps = tuple(
        Consumed(facts.lengths[scan], atoms, ("scan", scan))
        for scan, atoms in zip(scans, stack, strict=True)
    )
    largest = max(paths, key=lambda path: _size(facts, path))
    axes = (*stack, *weight_axes)
    source = ViewSource(f"{largest}@effective", axes, axes, consumed=steps, computed_from=paths)
    new = View(value.number, 0, source, weight_axes)
    view = facts.computed.setdefault((value.number, tuple(scans)), new)
    use = kind.find(table, at, [*ins[: at.operand], view, *ins[at.operand + 1 :]])
    return None if isinstance(use, str) else use


def _paths(value: Value) -> tuple[str, ...]:
    views = [path for view in views_in(value) for path in paths_of(view)]
    return tuple(sorted({*views, *(path for path, _ in getattr(value, "reasons", ()))}))


def paths_of(view: View) -> tuple[str, ...]:
    """The paths of a view's parameters; several, if they were stacked for a scan."""
    return tuple(
        dict.fromkeys((view.source.path, *(member.source.path for member in view.source.members)))
    )


def _size(facts: Facts, path: str) -> int:
    return math.prod(
        map(facts.table.size, (a for axis in facts.parameters[path].source.origin for a in axis))
    )
