"""The rules for a single equation: its results are parameters in view, or data; it may be a use."""

import dataclasses
from collections.abc import Hashable, Sequence, Set

import jax.numpy as jnp
import numpy as np

from jaxkfac._jaxpr_compat import (
    Eqn,
    Var,
    call_kind,
    is_complex,
    is_mutable,
    is_stateful,
)
from jaxkfac.interception._functions import (
    looked_up_by_constants,
    seen_in,
    stack_looked_up,
    without_lookup_if_grown,
)
from jaxkfac.interception._kind import Data, Scope, Use, Value, kind_reading
from jaxkfac.interception._plan import Facts, Plan, reasons_of
from jaxkfac.interception._row_masks import is_mask
from jaxkfac.interception._structured import (
    Scans,
    follow_product,
)
from jaxkfac.interception._uses import uses_in, uses_of
from jaxkfac.interception._views import broadcast_axes, view_of
from jaxkfac.interception.values._axes import fresh, propagate
from jaxkfac.interception.values._values import (
    Combined,
    Constant,
    CoverageNote,
    Derived,
    Parameter,
    View,
    traced_indices_in,
    views_in,
    went_through,
)

_NOT_EXAMPLES = (
    "with a constant (whose rows are not seen to be the examples, the leading axis of an output or "
    "of a mark; give it a row for each, as in `h + 0 * x[:, :1]`)"
)
_FROZEN = "is frozen by `stop_gradient`"
_UNKNOWN_ROWS = (
    "is chosen by data in `select_n`, element by element: a `cond` under `vmap`, which chooses it "
    "for whole rows, can be followed"
)


class EquationRules(Facts):
    """The rules of equations without a body.

    Args:
        refused: Products of a parameter and a constant that are no layer uses.
        constants: Equations whose data has no example axis. Beside a parameter such data counts as
            a constant for the rows that it meets later, and the parameter stays a view.
        tables: Lookups of matrices that are no stacks of experts.
        by_row: Lookups by constants that hold an index for each example.

    Attributes:
        tables: Lookups that are no stacks, now that their readers are known.
        around: Positions of the calls around an equation.
    """

    def __init__(
        self,
        refused: Set[Hashable],
        constants: Set[Hashable],
        tables: Set[Hashable],
        by_row: Set[Hashable],
    ) -> None:
        super().__init__()
        self.tables = set(tables)
        self.around: tuple[int, ...] = ()
        self._refused, self._constants, self._by_row = refused, constants, by_row

    def where(self, eqn: Eqn) -> Hashable:
        return (*self.around, id(eqn))

    def opaque(self, eqn: Eqn, ins: Sequence[Value], reason: str = "") -> list[Value]:
        """The results of an equation that no rule looks into: data if any operand is data."""
        name = eqn.primitive.name
        out = [self.equation_number(eqn, ins, k) for k in range(len(eqn.outvars))]
        # A mutable array, or the host, may return data whatever the operands are.
        data = is_stateful(eqn) or any(isinstance(v, Data) or _is_rowless(v) for v in ins)
        parameters = [v for v in ins if isinstance(v, Parameter)]
        if not data and not parameters:
            mask = is_mask(eqn, ins)
            return [Constant(n, mask) for n in out]
        if not data:
            into = " to complex numbers" if is_complex(eqn.outvars[0]) else ""
            reasons = reasons_of(parameters, f"`{name}`{into}")
            return [
                Derived(n, reasons, traced_indices_in(ins)) if _differentiable(v) else Constant(n)
                for n, v in zip(out, eqn.outvars, strict=True)
            ]
        for v in parameters:
            self.report(v, reason or f"is read inside `{name}`")
        axes = [v.axes if isinstance(v, Data) else None for v in ins]
        if call_kind(eqn) is not None or not any(axes_ is not None for axes_ in axes):
            # Inside a loop or branch that is not followed, any axis may have become any other.
            shapes = [getattr(v.aval, "shape", ()) for v in eqn.outvars]
            results = [fresh(self.table, s) for s in shapes]
        else:
            results = propagate(self.table, eqn, axes)
        datas = [Data(n, a) for n, a in zip(out, results, strict=True)]
        first_data = ins[0] if ins else None
        if isinstance(first_data, Data) and first_data.product:
            product_axes = follow_product(eqn, first_data)
            if product_axes is not None:
                datas[0] = dataclasses.replace(
                    datas[0], product=first_data.product, product_axes=product_axes
                )
        return list(datas)

    def unread(self, eqn: Eqn, ins: Sequence[Value], failed: str) -> list[Value]:
        """The results of an equation whose analysis raised: nothing is known about them."""
        shapes = [getattr(v.aval, "shape", ()) for v in eqn.outvars]
        parameters = [v for v in ins if isinstance(v, Parameter)]
        if is_stateful(eqn) or any(isinstance(v, Data) or _is_rowless(v) for v in ins):
            for v in parameters:
                self.report(v, f"is read inside `{eqn.primitive.name}`, {failed}")
            return [Data(self.unique(), fresh(self.table, s)) for s in shapes]
        reasons = reasons_of(parameters, f"`{eqn.primitive.name}`, {failed},")
        return [
            Derived(self.unique(), reasons, traced_indices_in(ins))
            if reasons and _differentiable(v)
            else Constant(self.unique())
            for v in eqn.outvars
        ]

    def of_parameters(
        self, eqn: Eqn, position: int, ins: list[Value], plan: Plan, scans: Scans
    ) -> list[Value]:
        """The results of an equation that reads parameters, by the first rule that applies."""
        name = eqn.primitive.name
        number = self.equation_number(eqn, ins)
        if name == "stop_gradient":
            return self._stop_gradient(ins, number)
        if any(map(is_mutable, eqn.invars)):  # values written into a Ref are not followed
            return self.opaque(eqn, ins)
        # An integer or a comparison has no gradient, so no factor lacks it: a note, no error.
        if not any(_differentiable(v) for v in eqn.outvars):
            return self._reported_only(eqn, ins, f"is read without gradient by `{name}`")
        # A barrier returns each operand unchanged, so several parameters stay in view at once; the
        # rules for views below allow only one.
        if name == "optimization_barrier":
            plan.views[position] = None
            return list(ins)
        ins = self._with_rows_of_indices(eqn, ins)
        views = self._views_of(eqn, position, ins, plan, number)
        if isinstance(views, str):
            return self.opaque(eqn, ins, views)
        if views is not None:
            plan.views[position] = _traced_index(ins, views)
            return views
        if not any(isinstance(v, Data) for v in ins):
            return self._product_of_constant(eqn, position, ins, plan, scans)
        return self._meeting_with_data(eqn, position, ins, plan, scans, number)

    def _stop_gradient(self, ins: list[Value], number: int) -> list[Value]:
        """``stop_gradient``: its result is a constant, whose parameter ``_chosen`` may ask for."""
        for v in ins:
            self.report(v, _FROZEN, fatal=False)
            if isinstance(v, View):
                self.stopped[number] = v
        return [Constant(number)]

    def _reported_only(self, eqn: Eqn, ins: list[Value], reason: str) -> list[Value]:
        """The parameters are reported, without an error, and read like constants."""
        for v in ins:
            self.report(v, reason, fatal=False)
        quiet = [Constant(v.number) if isinstance(v, Parameter) else v for v in ins]
        return self.opaque(eqn, quiet)

    def _with_rows_of_indices(self, eqn: Eqn, ins: list[Value]) -> list[Value]:
        """The constant indices of a lookup as data, if they hold an index for each example."""
        if eqn.primitive.name != "gather" or self.where(eqn) not in self._by_row:
            return ins
        rows = fresh(self.table, eqn.invars[1].aval.shape, "feature")
        return [ins[0], Data(ins[1].number, rows)]

    def _views_of(
        self, eqn: Eqn, position: int, ins: list[Value], plan: Plan, number: int
    ) -> list[Value] | str | None:
        """The results as views of parameters.

        The result is a reason in words if the parameters cannot be followed, and ``None`` if the
        equation is no view.
        """
        name = eqn.primitive.name
        results: list[Value] | None = seen_in(self, eqn, ins)
        if results is not None and name == "gather":
            results = looked_up_by_constants(eqn, ins, results, self.where(eqn))
        elif results is not None:
            results = without_lookup_if_grown(eqn, ins, results)
        if results is None and name == "select_n":
            chosen = self._chosen(ins, position, plan, number)
            if isinstance(chosen, str):
                return chosen
            results = chosen
        # A lookup of matrices counts as a stack of experts until one of its readers shows that it
        # is a table; the analysis then runs again, with the lookup among ``tables``.
        if results is None and name == "gather" and self.where(eqn) not in self.tables:
            results = self._entry_of_stack(eqn, position, ins, plan)
        if results is None and self.where(eqn) in self._constants:
            results = seen_in(self, eqn, [_as_constant(v) for v in ins])
            results = results and [_rowless(v, name) for v in results]
        return results

    def _entry_of_stack(
        self, eqn: Eqn, position: int, ins: list[Value], plan: Plan
    ) -> list[Value] | None:
        """A matrix looked up by data, as in a mixture of experts: a view of the stack."""
        stack = stack_looked_up(self, eqn, ins, self.where(eqn))
        if stack is None:
            return None
        plan.lookups.add(position)
        return [stack]

    def _meeting_with_data(
        self, eqn: Eqn, position: int, ins: list[Value], plan: Plan, scans: Scans, number: int
    ) -> list[Value]:
        """A parameter and data in one equation: layer uses, or what the report says of it."""
        name = eqn.primitive.name
        kind = kind_reading(name)
        # A scalar has no rows: what is added to a loss is a penalty, whose gradient is no
        # statistic of the data.
        if kind is not None and kind.inserts and eqn.outvars[0].aval.shape == ():
            return self._reported_only(eqn, ins, "is also in a parameter-only term")
        uses = uses_in(self, eqn, ins, Scope(scans, self.where(eqn)))
        if not uses or isinstance(uses, str):
            for v in ins:
                if reasons := getattr(v, "reasons", ()):
                    self.report(Derived(0, reasons), f"meets data in `{name}`")
            if isinstance(uses, str):
                return self.opaque(eqn, ins, uses)
            return self.opaque(eqn, [v if isinstance(v, Data) else Constant(v.number) for v in ins])
        return [self._result(eqn, position, ins, uses, plan, number)]

    def follow_stopped(self, eqn: Eqn, ins: Sequence[Value], outs: Sequence[Value]) -> None:
        """Follow views of a parameter that ``stop_gradient`` made a constant.

        A second ``vmap`` broadcasts it before ``select_n`` reads it.
        """
        stopped = [self.stopped.get(v.number, v) for v in ins]
        if sum(isinstance(v, View) for v in stopped) == 1:
            views = view_of(self, eqn, stopped) or []
            self.stopped.update((o.number, v) for o, v in zip(outs, views, strict=False))

    def _chosen(
        self, ins: list[Value], position: int, plan: Plan, number: int
    ) -> list[Value] | str | None:
        """``select_n(which, stop_gradient(w), w)`` as a view of ``w`` that applies to some rows.

        ``vmap`` makes it of a cond whose predicate differs from row to row: all branches run on all
        rows, and in each the parameters have a gradient only in the rows that take the branch. The
        result is a reason in words if those rows are unknown, and ``None`` for another equation.
        """
        which, untaken, view = ins[0], ins[1], ins[-1]
        if not (isinstance(which, Data) and isinstance(view, View)):
            return None
        stopped = self.stopped.get(untaken.number)
        if stopped is None or stopped.number != view.number:
            return None
        # The stopped branch is the way in which `vmap` writes "not this row", and does not freeze
        # the parameter.
        self.findings.pop(CoverageNote(view.source.path, _FROZEN, False), None)
        if view.axes is None:
            return _UNKNOWN_ROWS
        rows = broadcast_axes(self.table, view.axes)
        other_atoms = [a for d, axis in enumerate(which.axes) if d not in rows for a in axis]
        # The choice also varies along an axis that is not the parameter's row, so it picks elements
        # and not rows.
        if any(self.table.kinds(a) - {"feature"} for a in self.table.atoms(tuple(other_atoms))):
            return _UNKNOWN_ROWS
        plan.choices[position] = rows
        choice = tuple((view.axes[d], which.axes[d]) for d in rows)
        return [dataclasses.replace(view, number=number, chosen=(*view.chosen, choice))]

    def _product_of_constant(
        self, eqn: Eqn, position: int, ins: list[Value], plan: Plan, scans: Scans
    ) -> list[Value]:
        """A constant times a parameter: a layer use if the constant's rows are the examples.

        The remaining program decides that (``_examples``): ``x @ w + zeros @ u`` makes the rows of
        both products the same.
        """
        number = self.equation_number(eqn, ins)
        kind = kind_reading(eqn.primitive.name)
        sees_one = sum(bool(views_in(v)) for v in ins) == 1
        sees_one &= not any(isinstance(v, Derived) for v in ins)
        if kind is None or not kind.product or not sees_one:
            return self.opaque(eqn, ins)
        if self.where(eqn) in self._refused:
            reasons = reasons_of(ins, f"`{eqn.primitive.name}` {_NOT_EXAMPLES}")
            self.of_constants.update(reasons)
            return [Derived(number, reasons, traced_indices_in(ins))]
        rows: list[Value] = [
            # The constant gets axes as if it were data; the rows that it meets later decide what
            # they are.
            Data(v.number, fresh(self.table, a.aval.shape, "feature"), constant=True)
            if isinstance(v, Constant)
            else v
            for v, a in zip(ins, eqn.invars, strict=True)
        ]
        where = self.where(eqn)
        uses = uses_of(self.table, eqn, rows, Scope(scans, where))
        if isinstance(uses, str):
            return self.opaque(eqn, ins)
        product = self._result(eqn, position, rows, uses, plan, number)
        return [dataclasses.replace(product, products=frozenset([where]))]

    def _result(
        self,
        eqn: Eqn,
        position: int,
        ins: list[Value],
        uses: list[Use],
        plan: Plan,
        number: int,
    ) -> Data:
        """The result of an equation with layer uses, which enter the plan."""
        axes_in = [v.axes if isinstance(v, Data) else None for v in ins]
        # The kind is asked first, because the general rules cannot follow rows through a primitive
        # such as `ragged_dot`.
        axes = uses[0].kind.result_axes(self.table, uses[0])
        axes = propagate(self.table, eqn, axes_in)[0] if axes is None else axes
        plan.uses[position] = uses = [use.kind.with_result(use, axes) for use in uses]
        product_axes = uses[0].kind.product_axes(uses[0], len(axes))
        # A bias that is added to the product of a computed weight is a parameter, but the weight of
        # its block is not. So they are not joined.
        if product_axes is None or uses[0].view.source.computed_from:
            return Data(number, axes)
        parts = tuple(u for u in uses if u.kind.covered and not u.view.source.computed_from)
        return Data(number, axes, parts, product_axes)


def _is_rowless(value: Value) -> bool:
    return any(v.history.rowless for v in views_in(value))


def _rowless(value: Value, primitive: str) -> Value:
    """The value, marked as having met data without the example axis."""
    if isinstance(value, Combined):
        views = tuple(went_through(v, rowless=primitive) for v in value.views)
        return dataclasses.replace(value, views=views)
    return went_through(value, rowless=primitive) if isinstance(value, View) else value


def _as_constant(value: Value) -> Value:
    return Constant(value.number) if isinstance(value, Data) else value


def _differentiable(var: Var) -> bool:
    return jnp.issubdtype(getattr(var.aval, "dtype", np.dtype(bool)), jnp.inexact)


def _traced_index(ins: Sequence[Value], outs: Sequence[Value]) -> tuple[str, int] | None:
    """The traced index by which a view selects an entry of a stack, or ``None``."""
    before = next((len(v.source.consumed) for value in ins for v in views_in(value)), 0)
    new = next((v.source.consumed[before:] for value in outs for v in views_in(value)), ())
    return new[0].traced_index if new else None
