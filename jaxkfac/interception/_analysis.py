"""Abstract interpretation of a traced function: where parameters meet data.

The interpreter walks the jaxpr, down through jit, checkpoint, scan, cond and shard_map, and follows
three things at once: parameters through views (``_views``), axes through data (``_axes``), and
value numbers, by which uses that read the same input are recognized. Every equation that reads a
parameter ends up as a use, a view or a finding: that is the completeness argument.
"""

import collections
import contextlib
import dataclasses
from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxkfac._errors import JaxkfacError, UnknownLayerError
from jaxkfac._interpreter import Interpreter
from jaxkfac._jaxpr_compat import (
    ClosedJaxpr,
    Eqn,
    Jaxpr,
    Var,
    VarOrLiteral,
    body_of,
    call_kind,
    is_complex,
    is_layer,
    is_loop,
    is_var,
    scan_counts,
)
from jaxkfac.interception._constant_rows import Meeting
from jaxkfac.interception._custom import (
    APART,
    interpret_primal,
    interpret_rule,
    is_rule,
    step_without_derivative,
)
from jaxkfac.interception._equation_rules import EquationRules
from jaxkfac.interception._functions import is_followed, is_function, lookups_in
from jaxkfac.interception._kind import Data, Value, kind_reading, kinds_of_layers
from jaxkfac.interception._layer import IS_COMPLEX
from jaxkfac.interception._named_layers import layer_name
from jaxkfac.interception._plan import MARK_ROWS, Mark, Plan
from jaxkfac.interception._row_masks import holds_mask
from jaxkfac.interception._structured import (
    Interpreted,
    Scans,
    interpret_cond,
    interpret_scan,
    interpret_shard_map,
)
from jaxkfac.interception.values._axes import Axes, fresh
from jaxkfac.interception.values._values import (
    Constant,
    CoverageNote,
    Parameter,
    View,
    ViewSource,
    views_in,
)

_STRUCTURED = {"scan": interpret_scan, "cond": interpret_cond, "shard_map": interpret_shard_map}
_COMPLEX = (
    IS_COMPLEX + " ({}): factors are of real parameters; hold its real and imaginary parts as two "
    "parameters and read re + 1j * im in its place, or leave it out with uncovered='ignore'"
)


class Analysis(EquationRules, Interpreter[Value]):
    """The interpreter of a program, and its results.

    Args:
        closed: The traced function.
        paths: For each input, the parameter's path, or ``None`` for data.
        refused: Products of a parameter and a constant that are no layer uses.
        constants: Equations whose data has no example axis. Beside a parameter such data counts as
            a constant for the rows that it meets later, and the parameter stays a view.
        constant_inputs: Positions of inputs that are constants.
        tables: Lookups of matrices that are no stacks of experts.
        by_row: Lookups by constants that hold an index for each example.

    Attributes:
        plan: The plan of the outermost jaxpr.
        outputs: The value of each output.
        axes_of_input: The axes of each input that is data, by position.
        tables: Lookups that are no stacks, now that their readers are known.
    """

    def __init__(
        self,
        closed: ClosedJaxpr,
        paths: Sequence[str | None],
        refused: Set[Hashable] = frozenset(),
        constants: Set[Hashable] = frozenset(),
        constant_inputs: Set[int] = frozenset(),
        tables: Set[Hashable] = frozenset(),
        by_row: Set[Hashable] = frozenset(),
    ) -> None:
        super().__init__(refused, constants, tables, by_row)
        self.axes_of_input: dict[int, Axes] = {}
        ins = [
            Constant(self.unique()) if k in constant_inputs else self._input(v, path, k)
            for k, (v, path) in enumerate(zip(closed.jaxpr.invars, paths, strict=True))
        ]
        self.outputs, self.plan = self._interpret(closed.jaxpr, closed.consts, ins, ())
        self.closed_in.update(_products_in(self.outputs))
        self.tables |= lookups_in(self.outputs)
        for out in self.outputs:
            self.report(out, "is also in a parameter-only term", fatal=False)

    def _input(self, var: Var, path: str | None, position: int) -> Value:
        aval = var.aval
        if path is None:
            axes = fresh(self.table, getattr(aval, "shape", ()), "data")
            self.data_axes.append(axes)
            self.axes_of_input[position] = axes
            return Data(self.unique(), axes)
        # A constant and not data: a table of indices among the parameters has no rows of its own.
        if not jnp.issubdtype(aval.dtype, jnp.inexact):
            self.findings[
                CoverageNote(path, f"is held out: {aval.dtype} has no gradient", False)
            ] = None
            return Constant(self.unique())
        if is_complex(var):
            self.findings[CoverageNote(path, _COMPLEX.format(aval.dtype), True)] = None
            return Constant(self.unique())
        axes = fresh(self.table, aval.shape, "parameter")
        number = self.unique()
        view = View(number, number, ViewSource(path, axes, axes), axes)
        self.parameters[path] = view
        return view

    # -- the interpreter --------------------------------------------------------------

    def _interpret(
        self,
        jaxpr: Jaxpr,
        consts: Sequence[ArrayLike],
        ins: Sequence[Value],
        scans: Scans,
    ) -> Interpreted:
        plan = Plan(jaxpr, list(consts))
        # Results of the program count as readers: a product that is returned has a gradient of its
        # own.
        operands = [*(v for eqn in jaxpr.eqns for v in eqn.invars), *jaxpr.outvars]
        readers = collections.Counter(filter(is_var, operands))
        outs = self.run(jaxpr, consts, ins, (plan, scans, readers))
        return _read(jaxpr.outvars, outs, readers), plan

    def constant(self, operand: VarOrLiteral, value: Any) -> Constant:
        # Equal literals are one value, so that two products with the same constant share their
        # inputs.
        literal = not is_var(operand)
        key = (str(operand.aval), np.asarray(value).tobytes()) if literal else id(value)
        return Constant(self.number(key), holds_mask(value))

    def equation(self, eqn: Eqn, ins: Sequence[Value], position: int, within: Any) -> list[Value]:
        """The results of an equation; if its analysis raises, the equation is not covered."""
        (plan, scans, readers), around = within, self.around
        values = _read(eqn.invars, ins, readers)
        try:
            outs = self._followed(eqn, position, values, plan, scans)
        except (JaxkfacError, RecursionError):  # meant for the user; nested too deep as a whole
            raise
        except Exception as error:
            self.around = around
            # The rule that failed may have recorded a part of its findings.
            for records in (plan.uses, plan.views, plan.calls, plan.choices, plan.marks):
                records.pop(position, None)
            plan.lookups.discard(position)
            message = " ".join(f"{type(error).__name__}: {error}".split())
            outs = self.unread(eqn, values, f"whose analysis failed ({message})")
        if lookups := lookups_in(values):
            uses = plan.uses.get(position, ())
            # A lookup is only a stack of experts if every reader treats what was picked as a
            # kernel; otherwise it is a table.
            if not is_followed(eqn, call_kind(eqn), outs, uses):
                self.tables |= lookups
        if products := _products_in(values):
            outs = self._from_products(eqn, values, outs, products)
        return outs

    def _followed(
        self, eqn: Eqn, position: int, ins: list[Value], plan: Plan, scans: Scans
    ) -> list[Value]:
        self.reads.update(view.source.path for v in ins for view in views_in(v))
        kind = call_kind(eqn)
        has_parameters = any(isinstance(v, Parameter) for v in ins)
        if eqn.primitive.name == MARK_ROWS:
            return self._mark(eqn, position, ins, plan)
        if kind == "jit" and eqn.params.get("name") == APART:
            axes = (fresh(self.table, v.aval.shape) for v in eqn.outvars)
            return [Data(self.unique(), axes_of_result) for axes_of_result in axes]
        if _is_whole(eqn, ins):
            _check_registered(eqn)
            return self.of_parameters(eqn, position, ins, plan, scans)
        if kind in ("jit", "checkpoint") or (kind == "custom" and not has_parameters):
            with self._inside(position):
                outs, inner = self._interpret(*body_of(eqn), ins, scans)
            if kind != "custom":
                # Without an entry the rewriter emits the call as it is, which keeps a custom
                # derivative.
                plan.calls[position] = inner
            if kind == "jit":
                inner.exports_views = any(map(views_in, outs))
            return outs if kind == "jit" else [self.outside(v, eqn) for v in outs]
        if kind in _STRUCTURED:
            into = _STRUCTURED[kind]
            with self._inside(position):
                outs, plan.calls[position] = into(self, self._interpret, eqn, ins, scans)
            return outs
        alone = not any(isinstance(v, Data) for v in ins)
        # Behind an elementwise function with a custom derivative, as in `softplus(w)`, a parameter
        # is still seen; any other custom derivative of parameters alone hides them.
        function = kind == "custom" and alone and is_function(eqn)
        if kind == "custom" and not alone:
            return self._custom(eqn, position, ins, plan, scans)
        if not has_parameters or (kind is not None and not function):
            outs = self.opaque(eqn, ins)
            self.follow_stopped(eqn, ins, outs)
            return outs
        return self.of_parameters(eqn, position, ins, plan, scans)

    def _from_products(
        self, eqn: Eqn, ins: list[Value], outs: list[Value], products: frozenset[Hashable]
    ) -> list[Value]:
        """The results of an equation that reads products of constants."""
        followed = call_kind(eqn) in ("jit", "checkpoint") and not _is_whole(eqn, ins)
        if followed or eqn.primitive.name == MARK_ROWS:
            return outs  # its body was followed, or it is an identity
        if is_loop(eqn):  # constants of its body were followed too
            constants, carries = scan_counts(eqn)
            for k, v in enumerate(ins):
                if isinstance(v, Data) and v.products and k >= constants + carries:
                    # The first axis of copies is the examples, and the scan would slice along it.
                    self.closed_in.update(v.products)
                # A carry that starts as a product of constants takes the rows that the loop gives
                # it.
                elif isinstance(v, Data) and v.products and k >= constants:
                    place = (self.where(eqn), k)
                    self.meetings[place] = Meeting(eqn, (v.axes,), v.products, carry=True)
            return outs
        rows = tuple(v.axes for v in ins if isinstance(v, Data) and not v.products)
        if call_kind(eqn) is not None:
            self.closed_in.update(products)
        elif rows:
            self.meetings[self.where(eqn)] = Meeting(eqn, rows, products)
        else:
            return [
                dataclasses.replace(v, products=products) if isinstance(v, Data) else v
                for v in outs
            ]
        return outs

    @contextlib.contextmanager
    def _inside(self, position: int) -> Iterator[None]:
        self.around, around = (*self.around, position), self.around
        try:
            yield
        finally:
            self.around = around

    def _custom(
        self, eqn: Eqn, position: int, ins: list[Value], plan: Plan, scans: Scans
    ) -> list[Value]:
        step = "" if is_rule(eqn) else step_without_derivative(eqn)
        if step:
            name = eqn.primitive.name
            return self.opaque(
                eqn, ins, f"is read inside `{name}`, where `{step}` has no derivative"
            )
        with self._inside(position):
            interpret = interpret_rule if is_rule(eqn) else interpret_primal
            outs, plan.calls[position] = interpret(self, self._interpret, eqn, ins, scans)
        return outs

    def _mark(self, eqn: Eqn, position: int, ins: list[Value], plan: Plan) -> list[Value]:
        x = ins[0]
        if isinstance(x, Data):
            mask = ins[1].number
            plan.marks[position] = Mark(x.axes[: len(eqn.invars[1].aval.shape)], mask)
        elif views_in(x):
            plan.views[position] = None  # a parameter has no rows to mark, but its slots go on
        return [x]


def _read(
    operands: Sequence[VarOrLiteral], values: Sequence[Value], readers: Mapping[Var, int]
) -> list[Value]:
    """The values of operands; a product that is read more than once is followed no further.

    A bias that one of two readers adds does not reach the other, so its gradient is not that of the
    product, and it is joined to none.
    """
    return [
        dataclasses.replace(x, product=(), product_axes=())
        if isinstance(x, Data) and x.product and readers[v] > 1
        else x
        for v, x in zip(operands, values, strict=True)
    ]


def _is_whole(eqn: Eqn, ins: Sequence[Value]) -> bool:
    """Whether an equation is a layer that its user named, where it reads parameters and data."""
    parameters, data = (any(isinstance(v, x) for v in ins) for x in (Parameter, Data))
    return is_layer(eqn) and parameters and data


def _check_registered(eqn: Eqn) -> None:
    """Refuse a named layer that no kind reads: its parameters would have no factors of its own."""
    name = eqn.primitive.name
    if kind_reading(name) is None:
        registered = ", ".join(f"`{layer}` (by {kind!r})" for layer, kind in kinds_of_layers())
        raise UnknownLayerError(
            f"no kind of layer reads `{name}`, the calls of jk.layer({layer_name(eqn)!r}, ...); "
            f"read are {registered or 'no named layers'}: import what registers the kind, or call "
            "the function without jk.layer, so that jaxkfac looks inside"
        )


def _products_in(values: Sequence[Value]) -> frozenset[Hashable]:
    """The products of constants from which some of these values come, and from nothing else."""
    return frozenset().union(*(v.products for v in values if isinstance(v, Data)))
