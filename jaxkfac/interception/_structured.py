"""Equations whose body sees other values than their operands: scan, cond and shard_map."""

import dataclasses
from collections.abc import Callable, Hashable, Sequence

from jax.typing import ArrayLike

from jaxkfac._jaxpr_compat import (
    Eqn,
    Jaxpr,
    bodies_of,
    body_of,
    copy_like,
    read_order,
    scan_counts,
)
from jaxkfac.interception._kind import Data, Scope, Use, UseSite, Value, kind_reading
from jaxkfac.interception._plan import Facts, Plan, reasons_of
from jaxkfac.interception._views import reversal
from jaxkfac.interception.values._axes import Atoms, AxisTable, UseAxes, fresh, merge
from jaxkfac.interception.values._values import (
    Combined,
    Constant,
    Consumed,
    Derived,
    Parameter,
    View,
    traced_indices_in,
    views_in,
    went_through,
)

# ---------------- products seen through views
#
# A bias that is added behind such a view still belongs to the product.


ProductAxes = tuple[Atoms | None, ...]  # as in ``Data.product_axes``

_KEEPS_PRODUCT = frozenset(
    "convert_element_type reshape transpose copy name squeeze broadcast_in_dim "
    "sharding_constraint reshard reduce_precision".split()
)


def without_product(value: Value) -> Value:
    """The value without its product, so that no bias is joined to it."""
    if isinstance(value, Data) and value.product:
        return Data(value.number, value.axes)
    return value


def follow_product(eqn: Eqn, value: Data) -> ProductAxes | None:
    """The parameter axes of a product behind a view of it, or ``None`` if they are lost."""
    name, before = eqn.primitive.name, value.product_axes
    if name not in _KEEPS_PRODUCT:
        return None
    if name == "transpose":
        return tuple(before[d] for d in eqn.params["permutation"])
    if name == "squeeze":
        return tuple(a for d, a in enumerate(before) if d not in eqn.params["dimensions"])
    if name in ("reshape", "broadcast_in_dim"):
        shape, target = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        order = read_order(eqn) if name == "reshape" else range(len(shape))
        axes, sizes = tuple(before[d] for d in order), [shape[d] for d in order]
        return _reshaped_product(axes, sizes, target)
    return before


def _reshaped_product(
    before: ProductAxes, shape: Sequence[int], target: Sequence[int]
) -> ProductAxes | None:
    """Axes behind a reshape: rows may be regrouped, the axes of the parameter may not."""
    out: list[Atoms | None] = []
    i = 0
    while i < len(shape) or len(out) < len(target):
        size = target[len(out)] if len(out) < len(target) else None
        if i < len(shape) and shape[i] == size:
            out.append(before[i])
            i += 1
        elif size == 1:
            out.append(None)
        elif i < len(shape) and shape[i] == 1 and not before[i]:
            i += 1
        else:  # rows regrouped: take axes from both sides until their sizes agree
            if i == len(shape) or size is None:
                return None
            have, want = shape[i], size
            group, i = [before[i]], i + 1
            out.append(None)
            while have != want:
                if have < want:
                    if i == len(shape):
                        return None
                    have, group, i = have * shape[i], [*group, before[i]], i + 1
                else:
                    if len(out) == len(target):
                        return None
                    want *= target[len(out)]
                    out.append(None)
            if any(group):
                return None
    return tuple(out)


# ---------------- scan, cond and shard_map


MODIFIED = "is carried through `scan` and modified"
Scans = tuple[int, ...]  # identities of the scans and branches around an equation
Interpreted = tuple[list[Value], Plan]
Interpret = Callable[[Jaxpr, Sequence[ArrayLike], Sequence[Value], Scans], Interpreted]


def interpret_scan(
    facts: Facts, interpret: Interpret, eqn: Eqn, ins: Sequence[Value], scans: Scans
) -> Interpreted:
    """The results of a scan, and the plan for its body."""
    body, consts = body_of(eqn)
    (nc, nk), length = scan_counts(eqn), eqn.params["length"]
    scan = len(facts.scanned) + 1
    facts.scanned[scan] = tuple(a for v in ins[nc + nk :] if isinstance(v, Data) for a in v.axes[0])
    facts.lengths[scan] = length
    xs = [_slice_of(facts, v, scan, length) for v in ins[nc + nk :]]
    # A carry has another value in each iteration, so it does not keep the number of the first; only
    # a parameter that is carried unchanged does.
    carry = [
        v if views_in(v) else dataclasses.replace(_begun(v), number=facts.unique())
        for v in ins[nc : nc + nk]
    ]
    while True:  # a carry that becomes data may make another one data in the next iteration
        findings = dict(facts.findings)
        inside = [*map(without_product, ins[:nc]), *carry, *xs]
        outs, plan = interpret(body, consts, inside, (*scans, scan))
        unchanged = [body.outvars[k] is body.invars[nc + k] for k in range(nk)]
        grown = [
            _join(facts, before, after, unchanged=is_unchanged)
            for before, after, is_unchanged in zip(carry, outs[:nk], unchanged, strict=True)
        ]
        if all(a is b for a, b in zip(grown, carry, strict=True)):
            break
        # What the body reported with the former carry may not hold with the new one.
        carry, facts.findings = grown, findings
    for k, (before, after) in enumerate(zip(ins[nc : nc + nk], carry, strict=True), start=nc):
        if isinstance(before, View) and isinstance(after, Data):
            plan.entries[k] = _start_of(eqn, k, before, after, scans)
        elif isinstance(before, Parameter) and isinstance(after, Data):
            facts.report(before, MODIFIED)
    facts.closed_in.update(p for v in outs if isinstance(v, Data) for p in v.products)
    plan.scan = scan
    last = [dataclasses.replace(v, number=facts.unique()) for v in carry]
    return [*last, *(_stacked(facts, v, length) for v in outs[nk:])], plan


def _begun(value: Value) -> Value:
    """A value as the carry of a scan; there it has rows, whatever it was made of before."""
    value = without_product(value)
    return dataclasses.replace(value, products=frozenset()) if isinstance(value, Data) else value


def _start_of(eqn: Eqn, operand: int, view: View, carry: Data, scans: Scans) -> Use:
    """The use of a learned initial state, which is placed beside data once, like a class token."""
    kind = kind_reading("add")
    assert kind is not None
    # The carry's axes show whether the parameter is repeated for each example or is one value that
    # the loop modifies; see ``_examples``.
    start = UseSite(
        copy_like(eqn.invars[operand]), 0, Scope(scans, (MODIFIED, id(eqn), operand, scans))
    )
    use = Use(kind, view, start, carry, UseAxes(rows=carry.axes))
    return kind.with_result(use, carry.axes)


def _slice_of(facts: Facts, value: Value, scan: int, length: int) -> Value:
    """The value of a scanned operand in one iteration."""
    value = without_product(value)
    number = facts.number((scan, "xs", value.number))
    if isinstance(value, Data):
        return Data(number, value.axes[1:])
    if isinstance(value, Combined) and (first := _of_stack(facts, value, scan)) is not None:
        return dataclasses.replace(first, number=number)
    if isinstance(value, Combined):
        sliced = (_slice_of(facts, view, scan, length) for view in value.views)
        views = tuple(v for value in sliced for v in views_in(value))
        traced_indices = value.traced_indices | {("scan", scan)}
        return dataclasses.replace(value, number=number, views=views, traced_indices=traced_indices)
    if isinstance(value, View):
        arrangement = facts.number((scan, "xs", value.arrangement))
        value = dataclasses.replace(value, number=number, arrangement=arrangement)
        if value.axes is None:
            return value
        if lost_by := _lost_in_iteration(facts.table, value):
            return dataclasses.replace(went_through(value, lost_by=lost_by), axes=None)
        step = Consumed(length, value.axes[0], ("scan", scan))
        source = value.source._replace(consumed=(*value.source.consumed, step))
        return dataclasses.replace(value, axes=value.axes[1:], source=source)
    if isinstance(value, Derived):
        traced_indices = value.traced_indices | {("scan", scan)}
        return dataclasses.replace(value, number=number, traced_indices=traced_indices)
    return dataclasses.replace(value, number=number)


def _lost_in_iteration(table: AxisTable, view: View) -> str:
    """The primitive because of which no iteration of a scan reads an entry of the first axis."""
    assert view.axes is not None
    if any(join.array_axis == view.axes[0] for join in view.joins):  # only some iterations read it
        return "scan"
    if view.chosen or view.picked:  # its rows are not those of single iterations
        return "select_n" if view.chosen else "gather"
    # Iteration i reads another row.
    return "rev" if reversal(table, view, view.axes[0]) != "none" else ""


def _of_stack(facts: Facts, value: Combined, scan: int) -> View | None:
    """The value in one iteration of parameters that were stacked for a scan, if they are alike."""
    table, first = facts.table, value.views[0]
    alike = {_layout(table, view) for view in value.views}
    if value.reasons or None in alike or len(alike) > 1:
        return None
    lie = [view.joins[0] for view in value.views]
    iterations = range(table.size(*lie[0].array_axis))
    if [(j.start, j.size, j.parameter_axis) for j in lie] != [(i, 1, ()) for i in iterations]:
        return None
    assert first.axes is not None
    arrangement = facts.number(("stack", scan, *(view.arrangement for view in value.views)))
    source = first.source._replace(members=value.views, stacked_for=scan)
    return dataclasses.replace(
        first, axes=first.axes[1:], joins=(), source=source, arrangement=arrangement
    )


def _layout(table: AxisTable, view: View) -> Hashable:
    """How a view reads its parameter along all axes but the first; ``None`` if unknown."""
    if not view.axes or len(view.joins) != 1 or view.joins[0].array_axis != view.axes[0]:
        return None
    if view.source.consumed or view.history.reversed or view.source.members or view.picked:
        return None
    parameter_atoms = [a for axis in view.source.remaining_axes for a in table.atoms(axis)]
    read = [tuple(map(parameter_atoms.index, table.atoms(axis))) for axis in view.axes[1:]]
    return (
        tuple(map(table.size, parameter_atoms)),
        tuple(read),
        view.history.function,
        len(view.history.scaled),
    )


def _join(facts: Facts, before: Value, after: Value, *, unchanged: bool) -> Value:
    """A carry that covers both the first iteration and the later ones."""
    if isinstance(before, Data):
        if isinstance(after, Data):
            # Each iteration puts its result in the place of the carry, so both have the same axes.
            for a, b in zip(before.axes, after.axes, strict=True):
                facts.table.unify(a, b)
        return before
    if isinstance(after, Data):
        return Data(facts.unique(), after.axes)
    if views_in(before) and unchanged:
        return before
    reasons = reasons_of((before, after), "`scan`")
    if not reasons or (isinstance(before, Derived) and dict(reasons) == dict(before.reasons)):
        return before
    return Derived(facts.unique(), reasons, traced_indices_in((before, after)))


def _stacked(facts: Facts, value: Value, length: int) -> Value:
    """The stacked result of a scan for one iteration's result."""
    number = facts.unique()
    if isinstance(value, Data):
        # Iterations may be positions, examples or layers: no rule says which, so none is assumed.
        return Data(number, (facts.table.new(length, "derived"), *value.axes))
    if views_in(value):
        return Derived(number, reasons_of([value], "`scan`"), traced_indices_in([value]))
    return dataclasses.replace(value, number=number)


def interpret_cond(
    facts: Facts, interpret: Interpret, eqn: Eqn, ins: Sequence[Value], scans: Scans
) -> Interpreted:
    """The results of a cond, and a plan whose calls are the plans for its branches."""
    index, *operands = map(without_product, ins)
    branches = []
    for body, consts in bodies_of(eqn):
        # Each branch has a scans of its own, because what one branch reads of an input does not
        # count in another.
        branch = len(facts.scanned) + 1
        facts.scanned[branch] = ()
        branches.append(interpret(body, consts, operands, (*scans, branch)))
    plan = Plan(bodies_of(eqn)[0][0], [], calls={k: p for k, (_, p) in enumerate(branches)})
    results = zip(*[outs for outs, _ in branches], strict=True)
    return [
        _any_of(facts, eqn, [index, *values], v.aval.shape)
        for v, values in zip(eqn.outvars, results, strict=True)
    ], plan


def _any_of(facts: Facts, eqn: Eqn, values: Sequence[Value], shape: tuple[int, ...]) -> Value:
    """The value of a result that is one of several; ``values`` begins with the branch index."""
    results = values[1:]
    if all(v == results[0] for v in results) and not isinstance(results[0], Data):
        return facts.outside(results[0], eqn)
    if any(isinstance(v, Data) for v in values):
        for v in results:
            facts.report(v, "is returned by a branch of `cond`")
        axes = [v.axes for v in results if isinstance(v, Data)]
        return Data(
            facts.unique(), merge(facts.table, axes, shape) if axes else fresh(facts.table, shape)
        )
    reasons = reasons_of(results, "`cond`")
    if not reasons:
        return Constant(facts.unique())
    return Derived(facts.unique(), reasons, traced_indices_in(results))


def interpret_shard_map(
    facts: Facts, interpret: Interpret, eqn: Eqn, ins: Sequence[Value], scans: Scans
) -> Interpreted:
    """The results of a shard_map, and the plan for its body."""
    body, consts = body_of(eqn)
    inside: list[Value] = []
    for value, outer, inner in zip(ins, eqn.invars, body.invars, strict=True):
        value, keeps_shape = without_product(value), outer.aval.shape == inner.aval.shape
        if views_in(value) and not keeps_shape:
            facts.report(value, "is split over mesh axes by `shard_map`")
            value = Data(facts.unique(), fresh(facts.table, inner.aval.shape))
        elif isinstance(value, Data) and not keeps_shape:
            axes = tuple(  # a shard: cannot be shown to be, or not to be, an example axis
                a if s == t else facts.table.new(t, "derived")
                for a, s, t in zip(value.axes, outer.aval.shape, inner.aval.shape, strict=True)
            )
            value = Data(facts.unique(), axes)
        inside.append(value)
    outs, plan = interpret(body, consts, inside, scans)
    results = [  # an axis that is a shard inside is a full axis outside, and which one is unknown
        Data(facts.unique(), fresh(facts.table, v.aval.shape))
        if isinstance(o, Data)
        else facts.outside(o, eqn)
        for o, v in zip(outs, eqn.outvars, strict=True)
    ]
    return results, plan
