"""Abstract interpretation of a traced function: where parameters meet data.

One walk over the jaxpr, down through jit, checkpoint, scan and shard_map, follows three
things at once: parameters through views (``_views``), axes through data (``_propagate``),
and value numbers, by which uses that read the same input are recognised. Whatever reads a
parameter ends up as a use, a view or a finding: that is the completeness argument.
"""

import collections
import dataclasses
from collections.abc import Sequence, Set
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxkfac.interception._axes import Atoms, AxisTable
from jaxkfac.interception._compat import Eqn, body_of, call_kind, is_var, read_order, scan_counts
from jaxkfac.interception._kind import kind_reading
from jaxkfac.interception._propagate import Axes, fresh, propagate
from jaxkfac.interception._uses import uses_of
from jaxkfac.interception._values import (
    Constant,
    Consumed,
    CoverageNote,
    Data,
    Derived,
    Use,
    Value,
    View,
)
from jaxkfac.interception._views import reversal, view_of

MARK_ROWS = "jaxkfac_mark_rows"
_KEEPS_PRODUCT = frozenset(
    "convert_element_type reshape transpose copy name squeeze broadcast_in_dim "
    "sharding_constraint reshard reduce_precision".split()
)
_NOT_EXAMPLES = (
    "with a constant (whose rows are not seen to be the examples: the leading axis of the first "
    "output; a recurrent state may start from data instead, as in `h + 0 * x[:, :1]`)"
)


@dataclasses.dataclass(eq=False)
class Mark:
    """A call of ``mark_rows``: the axes its mask speaks of."""

    axes: Axes


@dataclasses.dataclass(eq=False)
class Plan:
    """One jaxpr in one calling context, and what is special about its equations.

    Attributes:
        uses: Position of an equation -> the layer uses in it.
        views: Position of a view -> the index that walks along a stack in it, if any.
        marks: Position of a ``mark_rows`` -> what it marks.
        calls: Position of a structured equation -> the plan of its body.
        exports_views: Whether a result of the jaxpr is a view of a parameter.
        steps: The plan as the rewriter runs it, made by the rewriter once.
    """

    jaxpr: Any
    consts: list[Any]
    uses: dict[int, list[Use]] = dataclasses.field(default_factory=dict)
    views: dict[int, tuple[str, int] | None] = dataclasses.field(default_factory=dict)
    marks: dict[int, Mark] = dataclasses.field(default_factory=dict)
    calls: dict[int, "Plan"] = dataclasses.field(default_factory=dict)
    exports_views: bool = False
    steps: list[Any] | None = None

    def all_uses(self) -> list[Use]:
        """Every use, in program order."""
        found = []
        for position in sorted(self.uses.keys() | self.calls.keys()):
            found += self.uses.get(position, [])
            found += self.calls[position].all_uses() if position in self.calls else []
        return found

    def all_marks(self) -> list[Mark]:
        inner = [m for plan in self.calls.values() for m in plan.all_marks()]
        return list(self.marks.values()) + inner


class Analysis:
    """The walk and its results.

    Args:
        closed: The traced function.
        paths: For each input, the parameter's path, or ``None`` for data.
        refused: Products of a parameter and a constant that are no layer uses, by ``id`` of
            their equations.

    Attributes:
        plan: The plan of the outermost jaxpr.
        outputs: What is known of each output.
        table: The axis atoms.
        findings: What the coverage report says beside the uses.
        reads: Paths of the parameters that some equation reads.
        data_axes: Axes of the data arguments.
        walked: For each scan, the axes of data that it walks along (``lax.map``).
    """

    def __init__(
        self, closed: Any, paths: Sequence[str | None], refused: Set[int] = frozenset()
    ) -> None:
        self._refused = refused
        self.table = AxisTable()
        self.findings: dict[CoverageNote, None] = {}
        self.reads: set[str] = set()
        self.data_axes: list[Axes] = []
        self.walked: dict[int, Atoms] = {}
        self._numbers: dict[Any, int] = {}
        self._scans = 0
        ins = [
            self._input(v.aval, path) for v, path in zip(closed.jaxpr.invars, paths, strict=True)
        ]
        consts = [Constant(self._unique()) for _ in closed.consts]
        self.outputs, self.plan = self._walk(closed.jaxpr, consts, closed.consts, ins, ())
        for out in self.outputs:
            self._report(out, "is also in a parameter-only term", fatal=False)

    def _input(self, aval: Any, path: str | None) -> Value:
        if path is None:
            axes = fresh(self.table, getattr(aval, "shape", ()), "data")
            self.data_axes.append(axes)
            return Data(self._unique(), axes)
        if not jnp.issubdtype(aval.dtype, jnp.inexact):
            self.findings[
                CoverageNote(path, f"is held out: {aval.dtype} has no gradient", False)
            ] = None
            return Constant(self._unique())
        axes = fresh(self.table, aval.shape, "parameter")
        return View(self._unique(), path, origin=axes, axes=axes)

    def _unique(self) -> int:
        return self._number(object())

    def _number(self, key: Any) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _equation_number(self, eqn: Eqn, ins: Sequence[Value], result: int = 0) -> int:
        numbers = tuple(v.number for v in ins)
        try:
            return self._number((eqn.primitive.name, _frozen(eqn.params), numbers, result))
        except TypeError:
            return self._unique()

    def _report(self, value: Value, reason: str, *, fatal: bool = True) -> None:
        if isinstance(value, View):
            self.findings[CoverageNote(value.path, reason, fatal)] = None
        elif isinstance(value, Derived):
            for path, first in value.reasons:
                text = f"goes through {first} and {reason}" if fatal else reason
                self.findings[CoverageNote(path, text, fatal)] = None

    # -- the walk ---------------------------------------------------------------------

    def _walk(
        self,
        jaxpr: Any,
        const_values: Sequence[Value],
        consts: Sequence[Any],
        ins: Sequence[Value],
        scope: tuple[int, ...],
    ) -> tuple[list[Value], Plan]:
        plan = Plan(jaxpr, list(consts))
        readers = collections.Counter(
            v for eqn in jaxpr.eqns for v in eqn.invars if is_var(v)
        ) + collections.Counter(v for v in jaxpr.outvars if is_var(v))
        env: dict[Any, Value] = dict(zip(jaxpr.constvars, const_values, strict=True))
        env.update(zip(jaxpr.invars, ins, strict=True))

        def read(atom: Any) -> Value:
            if not is_var(atom):
                return Constant(self._number((str(atom.aval), np.asarray(atom.val).tobytes())))
            value = env[atom]
            # A second reader sees the product without what is added for the first: a bias of
            # one of them has another gradient than the product.
            if isinstance(value, Data) and value.product is not None and readers[atom] > 1:
                value = dataclasses.replace(value, product=None, product_axes=())
            return value

        for position, eqn in enumerate(jaxpr.eqns):
            values = [read(v) for v in eqn.invars]
            outs = self._equation(eqn, position, values, plan, scope)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars], plan

    def _equation(
        self, eqn: Eqn, position: int, ins: list[Value], plan: Plan, scope: tuple[int, ...]
    ) -> list[Value]:
        for v in ins:
            if isinstance(v, View):
                self.reads.add(v.path)
        kind = call_kind(eqn)
        has_parameters = any(isinstance(v, View | Derived) for v in ins)
        if kind == "jit" and eqn.params.get("name") == MARK_ROWS:
            return self._mark(eqn, position, ins, plan)
        if kind in ("jit", "checkpoint") or (kind == "custom" and not has_parameters):
            body, consts = body_of(eqn)
            const_values = [Constant(self._number(id(c))) for c in consts]
            outs, inner = self._walk(body, const_values, consts, ins, scope)
            if kind != "custom":
                plan.calls[position] = inner
            if kind == "jit":
                inner.exports_views = any(isinstance(v, View) for v in outs)
            return outs if kind == "jit" else [self._closed(v, eqn) for v in outs]
        if kind == "scan":
            return self._scan(eqn, position, ins, plan, scope)
        if kind == "shard_map":
            return self._shard_map(eqn, position, ins, plan, scope)
        if kind is not None or not has_parameters:
            return self._opaque(eqn, ins)
        return self._parameter_equation(eqn, position, ins, plan, scope)

    def _closed(self, value: Value, eqn: Eqn) -> Value:
        """A value that leaves a structured equation: there it is no longer followed as a view."""
        if isinstance(value, View):
            return Derived(self._unique(), ((value.path, f"`{eqn.primitive.name}`"),))
        return value

    def _mark(self, eqn: Eqn, position: int, ins: list[Value], plan: Plan) -> list[Value]:
        x = ins[0]
        if isinstance(x, Data):
            plan.marks[position] = Mark(x.axes[: len(eqn.invars[1].aval.shape)])
        return [x]

    def _opaque(self, eqn: Eqn, ins: Sequence[Value], reason: str = "") -> list[Value]:
        """An equation that no rule looks into: results are data if any operand is."""
        name = eqn.primitive.name
        out = [self._equation_number(eqn, ins, k) for k in range(len(eqn.outvars))]
        data = any(isinstance(v, Data) for v in ins)
        parameters = [v for v in ins if isinstance(v, View | Derived)]
        if not data and not parameters:
            return [Constant(n) for n in out]
        if not data:
            reasons = _reasons(parameters, f"`{name}`")
            return [
                Derived(n, reasons) if _differentiable(v) else Constant(n)
                for n, v in zip(out, eqn.outvars, strict=True)
            ]
        for v in parameters:
            self._report(v, reason or f"is read inside `{name}`")
        axes = [v.axes if isinstance(v, Data) else None for v in ins]
        if call_kind(eqn) is not None or not any(axes_ is not None for axes_ in axes):
            # Inside a loop or branch that is not walked, any axis may have become any other.
            shapes = [getattr(v.aval, "shape", ()) for v in eqn.outvars]
            results = [fresh(self.table, s) for s in shapes]
        else:
            results = propagate(self.table, eqn, axes)
        datas = [Data(n, a) for n, a in zip(out, results, strict=True)]
        first_data = ins[0] if ins else None
        if isinstance(first_data, Data) and first_data.product is not None:
            kept = _follow_product(self.table, eqn, first_data)
            if kept is not None:
                datas[0] = dataclasses.replace(
                    datas[0], product=first_data.product, product_axes=kept
                )
        return list(datas)

    def _parameter_equation(
        self, eqn: Eqn, position: int, ins: list[Value], plan: Plan, scope: tuple[int, ...]
    ) -> list[Value]:
        name = eqn.primitive.name
        number = self._equation_number(eqn, ins)
        if name == "stop_gradient":
            for v in ins:
                self._report(v, "is frozen by `stop_gradient`", fatal=False)
            return [Constant(number)]
        if not any(_differentiable(v) for v in eqn.outvars):
            for v in ins:
                self._report(v, f"is read without gradient by `{name}`", fatal=False)
            if not any(isinstance(v, Data) for v in ins):
                return [Constant(number)]
            quiet = [Constant(v.number) if isinstance(v, View | Derived) else v for v in ins]
            return self._opaque(eqn, quiet)
        if name == "optimization_barrier":
            plan.views[position] = None
            return list(ins)
        views = view_of(self.table, eqn, ins, number)
        if views is not None:
            before = next(v for v in ins if isinstance(v, View))
            new = views[0].consumed[len(before.consumed) :]
            plan.views[position] = new[0].walker if new else None
            return list(views)
        if not any(isinstance(v, Data) for v in ins):
            return self._product_of_constant(eqn, position, ins, plan, scope)
        kind = kind_reading(name)
        if kind is not None and kind.inserts and eqn.outvars[0].aval.shape == ():
            for v in ins:
                self._report(v, "is also in a parameter-only term", fatal=False)
            quiet = [Constant(v.number) if isinstance(v, View | Derived) else v for v in ins]
            return self._opaque(eqn, quiet)
        if any(isinstance(v, Derived) for v in ins):
            return self._opaque(eqn, ins, f"meets data in `{name}`")
        uses = uses_of(self.table, eqn, ins, scope)
        if isinstance(uses, str):
            return self._opaque(eqn, ins, uses)
        plan.uses[position] = uses
        return [self._result(eqn, ins, uses, number)]

    def _product_of_constant(
        self, eqn: Eqn, position: int, ins: list[Value], plan: Plan, scope: tuple[int, ...]
    ) -> list[Value]:
        """A constant times a parameter: rows of input like any other, if rows of examples.

        Whether they are, the rest of the program says (``_examples``): ``x @ w + zeros @ u``
        makes the rows of its operands the same.
        """
        number = self._equation_number(eqn, ins)
        kind = kind_reading(eqn.primitive.name)
        derived = any(isinstance(v, Derived) for v in ins)
        if kind is None or not kind.product or derived:
            return self._opaque(eqn, ins)
        if id(eqn) in self._refused:
            return [Derived(number, _reasons(ins, f"`{eqn.primitive.name}` {_NOT_EXAMPLES}"))]
        rows: list[Value] = [
            Data(v.number, fresh(self.table, a.aval.shape, "feature"))
            if isinstance(v, Constant)
            else v
            for v, a in zip(ins, eqn.invars, strict=True)
        ]
        uses = uses_of(self.table, eqn, rows, scope)
        if isinstance(uses, str):
            return self._opaque(eqn, ins)
        uses[0].from_constant = True
        plan.uses[position] = uses
        return [self._result(eqn, rows, uses, number)]

    def _result(self, eqn: Eqn, ins: list[Value], uses: list[Use], number: int) -> Data:
        axes_in = [v.axes if isinstance(v, Data) else None for v in ins]
        axes = propagate(self.table, eqn, axes_in)[0]
        for use in uses:
            use.kind.place(use, axes)
        product = uses[0].kind.product_axes(uses[0], len(axes))
        if product is None:
            return Data(number, axes)
        return Data(number, axes, uses[0], product)

    # -- structured equations ---------------------------------------------------------

    def _scan(
        self, eqn: Eqn, position: int, ins: list[Value], plan: Plan, scope: tuple[int, ...]
    ) -> list[Value]:
        p = eqn.params
        body, consts = body_of(eqn)
        (nc, nk), length = scan_counts(eqn), p["length"]
        self._scans += 1
        self.walked[self._scans] = tuple(
            a for v in ins[nc + nk :] if isinstance(v, Data) for a in v.axes[0]
        )
        scan, const_values = self._scans, [Constant(self._number(id(c))) for c in consts]
        xs = [self._slice_of(v, scan, length) for v in ins[nc + nk :]]
        # A carry is another value in each iteration, so it does not keep the number of its first;
        # only a parameter that is carried unchanged does.
        carry = [dataclasses.replace(_bare(v), number=self._unique()) for v in ins[nc : nc + nk]]
        carry = [v if isinstance(v, View) else c for v, c in zip(ins[nc:], carry, strict=False)]
        while True:  # a carry that becomes data may make another one data in the next iteration
            findings = dict(self.findings)
            inside = [*map(_bare, ins[:nc]), *carry, *xs]
            outs, inner = self._walk(body, const_values, consts, inside, (*scope, scan))
            grown = [
                self._join(carry[k], outs[k], body, nc, k, eqn.outvars[k].aval) for k in range(nk)
            ]
            if all(a is b for a, b in zip(grown, carry, strict=True)):
                break
            carry, self.findings = grown, findings
        for before, after in zip(ins[nc : nc + nk], carry, strict=True):
            if isinstance(before, View | Derived) and isinstance(after, Data):
                self._report(before, "is carried through `scan` and modified")
        plan.calls[position] = inner
        return [
            *(_with_number(v, self._unique()) for v in carry),
            *(self._stacked(v, length) for v in outs[nk:]),
        ]

    def _slice_of(self, value: Value, scan: int, length: int) -> Value:
        """What one iteration sees of a scanned operand."""
        value = _bare(value)
        number = self._number((scan, "xs", value.number))
        if isinstance(value, Data):
            return Data(number, value.axes[1:])
        if isinstance(value, View):
            if value.axes is None:
                return dataclasses.replace(value, number=number)
            if reversal(self.table, value, value.axes[0]) != "none":  # row i is not iteration i's
                return dataclasses.replace(value, number=number, axes=None, lost_by="rev")
            step = Consumed(length, value.axes[0], ("scan", scan))
            axes, consumed = value.axes[1:], (*value.consumed, step)
            return dataclasses.replace(value, number=number, axes=axes, consumed=consumed)
        return _with_number(value, number)

    def _join(self, before: Value, after: Value, body: Any, nc: int, k: int, aval: Any) -> Value:
        """The carry that covers both the first iteration and the later ones."""
        if isinstance(before, Data):
            if isinstance(after, Data):
                for a, b in zip(before.axes, after.axes, strict=True):
                    self.table.unify(a, b)
            return before
        if isinstance(after, Data):
            return Data(self._unique(), after.axes)
        if isinstance(before, View) and body.outvars[k] is body.invars[nc + k]:
            return before
        reasons = _reasons((before, after), "`scan`")
        if not reasons or (isinstance(before, Derived) and dict(reasons) == dict(before.reasons)):
            return before
        return Derived(self._unique(), reasons)

    def _stacked(self, value: Value, length: int) -> Value:
        number = self._unique()
        if isinstance(value, Data):
            return Data(number, (self.table.new(length, "derived"), *value.axes))
        if isinstance(value, View):
            return Derived(number, ((value.path, "`scan`"),))
        return _with_number(value, number)

    def _shard_map(
        self, eqn: Eqn, position: int, ins: list[Value], plan: Plan, scope: tuple[int, ...]
    ) -> list[Value]:
        body, consts = body_of(eqn)
        const_values = [Constant(self._number(id(c))) for c in consts]
        inside = []
        for value, outer, inner in zip(map(_bare, ins), eqn.invars, body.invars, strict=True):
            same = outer.aval.shape == inner.aval.shape
            if isinstance(value, View) and not same:
                self._report(value, "is split over mesh axes by `shard_map`")
                value = Data(self._unique(), fresh(self.table, inner.aval.shape))
            elif isinstance(value, Data) and not same:
                axes = tuple(  # a shard of an axis: nobody's example axis, nor surely not one
                    a if s == t else self.table.new(t, "derived")
                    for a, s, t in zip(value.axes, outer.aval.shape, inner.aval.shape, strict=True)
                )
                value = Data(self._unique(), axes)
            inside.append(value)
        outs, inner_plan = self._walk(body, const_values, consts, inside, scope)
        plan.calls[position] = inner_plan
        return [
            Data(self._unique(), fresh(self.table, v.aval.shape))
            if isinstance(o, Data)
            else self._closed(o, eqn)
            for o, v in zip(outs, eqn.outvars, strict=True)
        ]


def _reasons(values: Sequence[Value], this: str) -> tuple[tuple[str, str], ...]:
    """What each parameter went through first: this equation, or an earlier one; in words."""
    reasons: dict[str, str] = {}
    for value in values:
        if isinstance(value, View):
            reasons.setdefault(value.path, f"`{value.lost_by}`" if value.lost_by else this)
        elif isinstance(value, Derived):
            reasons |= value.reasons
    return tuple(sorted(reasons.items()))


def _frozen(params: dict[str, Any]) -> Any:
    items = tuple(sorted(params.items(), key=lambda kv: kv[0]))
    hash(items)
    return items


def _differentiable(var: Any) -> bool:
    return jnp.issubdtype(getattr(var.aval, "dtype", np.dtype(bool)), jnp.inexact)


def _bare(value: Value) -> Value:
    if isinstance(value, Data) and value.product is not None:
        return Data(value.number, value.axes)
    return value


def _with_number(value: Value, number: int) -> Value:
    return dataclasses.replace(value, number=number)


def _follow_product(table: AxisTable, eqn: Eqn, value: Data) -> tuple[Any, ...] | None:
    """The product's parameter axes behind a view of the product, or ``None``."""
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
        return _reshaped_product([before[d] for d in order], [shape[d] for d in order], target)
    return before


def _reshaped_product(before: Any, shape: Any, target: Any) -> tuple[Any, ...] | None:
    """Axes kept by a reshape: rows may be regrouped, the parameter's axes may not."""
    out: list[Any] = []
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
