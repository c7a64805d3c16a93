"""The base class of kinds that read calls of a function that a user named as one layer."""

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxkfac._jaxpr_compat import Eqn
from jaxkfac.interception import Data, LayerVjp, Reads, Use, UseSite
from jaxkfac.interception.values import Atoms, Axes, AxisTable, UseAxes, View
from jaxkfac.kinds._rows import ArrayOrShape, Rows, matrix_problem, order_problem
from jaxkfac.kinds._two_sided import TwoSided

_INPUTS, _OUTPUTS, _STACK = "i", "o", "s"


class NamedLayer(TwoSided):
    r"""A kind that reads the calls of ``jk.layer(name, fn)``, written for one point of data.

    ``fn`` has one argument with data and any number with parameters. A parameter $W$ is a matrix,
    or a stack of matrices (one for each frequency). A new kind says which rows meet it: the
    gradient of one point's loss with respect to each matrix has to be

    $$ \partial L / \partial W = \sum_r a_r g_r^\top, $$

    and ``input_rows_at`` returns the $a_r$, ``output_rows_at`` the $g_r$. Axes of data in front of
    those of one point, and those of ``vmap``, are added by this class. Arguments are counted by
    their leaves, in the order of ``jax.tree.leaves(args)``.

    Attributes:
        primitives: ``frozenset(("layer:NAME",))``.
        matrices: For each parameter, by the number of its argument, a letter for each axis: ``s``
            for the stack, ``i`` for inputs, ``o`` for outputs; ``{0: "sio"}``.
        data: The number of the argument with data.
        data_ndim: The number of axes of one point of data. Further axes in front of them are rows,
            and ``fn`` has to return them in front, too.
    """

    reads = Reads(complex=True)
    matrices: ClassVar[Mapping[int, str]]
    data: ClassVar[int]
    data_ndim: ClassVar[int]

    @abc.abstractmethod
    def input_rows_at(self, parameter: int, operands: Sequence[Any]) -> Any:
        """The rows that meet a parameter, from one point of data.

        Args:
            parameter: The number of the parameter's argument.
            operands: All arguments, one point of data among them.

        Returns:
            Real rows, ``(rows..., stack..., inputs...)``; the stack and the inputs have the sizes
            and the order of the parameter's axes.
        """

    @abc.abstractmethod
    def output_rows_at(self, parameter: int, operands: Sequence[Any], cotangent: Any) -> Any:
        """The cotangents of what the parameter's product returns, from that of one result.

        Args:
            parameter: The number of the parameter's argument.
            operands: All arguments, one point of data among them.
            cotangent: The gradient with respect to the result of ``fn``, as ``jax.vjp`` takes it.

        Returns:
            Real rows, ``(rows..., stack..., outputs...)``, with the rows of ``input_rows_at``.
        """

    # -- finding ----------------------------------------------------------------------

    def find(self, table: AxisTable, at: UseSite, ins: Sequence[Any]) -> Use | str:
        eqn, position, name = at.eqn, at.operand, at.eqn.primitive.name
        if position >= eqn.params["arguments"]:
            return f"is closed over by the function of `{name}`: pass it as an argument"
        if position not in self.matrices:
            read = " and ".join(map(str, self.matrices))
            return f"is argument {position} of `{name}`, whose kind reads arguments {read}"
        view, data = ins[position], ins[self.data]
        others = [k for k, v in enumerate(ins) if isinstance(v, Data) and k != self.data]
        if not isinstance(data, Data) or others:
            came = others or "no other argument"
            return f"meets data in {came} of `{name}`, whose kind expects it in {self.data}"
        problem = matrix_problem(table, view, name)
        if problem := problem or order_problem(table, view, view.axes or (), name):
            return problem
        call = _Mapped.of(eqn, self.data, self.data_ndim, position)
        if problem := call.problem or self._shape_problem(eqn, call, view):
            return f"{problem} in `{name}`"
        stacked = len(call.stack_levels)
        axes = {
            letter: tuple(
                view.axes[stacked + d]
                for d, its in enumerate(self.matrices[position])
                if its == letter
            )
            for letter in (_STACK, _INPUTS, _OUTPUTS)
        }
        rows = (data.axes[d] for d in call.row_axes_of_data)
        use_axes = UseAxes(
            inputs=axes[_INPUTS],
            outputs=axes[_OUTPUTS],
            stack=(*view.axes[:stacked], *axes[_STACK]),
            rows=(*rows, *(table.new(size, "feature") for size in self._rows(eqn, call))),
        )
        return Use(self, view, at, data, use_axes, detail=call)

    def _shape_problem(self, eqn: Eqn, call: "_Mapped", view: View) -> str:
        """The reason why the rows do not fit the parameter, or an empty string."""
        parameter, letters = call.parameter, self.matrices[call.parameter]
        sizes = eqn.invars[parameter].aval.shape[len(call.stack_levels) :]
        if len(sizes) != len(letters) or set(letters) - {_STACK, _INPUTS, _OUTPUTS}:
            return f"has shape {sizes}, whose axes are to be matrices[{parameter}]={letters!r}"
        lead = call.lead
        result, its_data = eqn.outvars[0].aval.shape, eqn.invars[self.data].aval.shape
        native = its_data[call.data_levels : call.data_levels + call.native]
        if result[len(call.levels) : lead] != native:
            return f"has a result of shape {result}, without the leading axes {native} of its data"
        rows = {}
        for letter, what in ((_INPUTS, "input_rows_at"), (_OUTPUTS, "output_rows_at")):
            shape = self._one(eqn, call, letter)
            if not jnp.issubdtype(shape.dtype, jnp.floating):
                return f"has {what} of {shape.dtype}, expected real rows"
            expected = [
                *(n for n, its in zip(sizes, letters, strict=True) if its == _STACK),
                *(n for n, its in zip(sizes, letters, strict=True) if its == letter),
            ]
            own = len(shape.shape) - len(expected)
            if own < 0 or list(shape.shape[own:]) != expected:
                return f"has {what} of shape {shape.shape}, expected (rows..., {expected})"
            rows[what] = shape.shape[:own]
        if len({*rows.values()}) > 1:
            return f"has different rows at both sides: {rows}"
        return ""

    def _one(self, eqn: Eqn, call: "_Mapped", letter: str) -> jax.ShapeDtypeStruct:
        """The shape of the rows of one point of data."""
        shapes = [
            jax.ShapeDtypeStruct(v.aval.shape[call.in_front(k) :], v.aval.dtype)
            for k, v in enumerate(eqn.invars[: eqn.params["arguments"]])
        ]
        result = eqn.outvars[0].aval
        cotangent = jax.ShapeDtypeStruct(result.shape[call.lead :], result.dtype)
        if letter == _INPUTS:
            return jax.eval_shape(functools.partial(self.input_rows_at, call.parameter), shapes)
        outputs = functools.partial(self.output_rows_at, call.parameter)
        return jax.eval_shape(outputs, shapes, cotangent)

    def _rows(self, eqn: Eqn, call: "_Mapped") -> tuple[int, ...]:
        """The shape of the rows that one point of data has."""
        letters = self.matrices[call.parameter]
        features = sum(letter != _OUTPUTS for letter in letters)
        shape = self._one(eqn, call, _INPUTS).shape
        return shape[: len(shape) - features]

    def result_axes(self, table: AxisTable, use: Use) -> Axes:
        call, shape = use.detail, use.at.eqn.outvars[0].aval.shape
        assert use.data is not None
        of_data = iter(use.data.axes)
        mapped = (
            next(of_data) if level[self.data] else table.new(size, "feature")
            for level, size in zip(call.levels, shape, strict=False)
        )
        native = (next(of_data) for _ in range(call.native))
        # The last axis is taken for features, and the others for positions that the layer mixes.
        own = shape[call.lead :]
        places = (table.new(size, "derived") for size in own[:-1])
        features = (table.new(size, "feature") for size in own[-1:])
        return (*mapped, *native, *places, *features)

    def reading(self, use: Use, place: Callable[[Atoms], list[int]]) -> str:
        return repr((id(use.at.eqn), use.at.operand))  # a call shares its input rows with no other

    # -- rows -------------------------------------------------------------------------

    def inputs(self, vjp: LayerVjp) -> Rows:
        def rows(*operands: Any) -> Any:
            return self.input_rows_at(vjp.use.at.operand, operands)

        return self._side(vjp, vjp.use.detail.over(rows, self._arguments(vjp)), vjp.use.axes.inputs)

    def outputs(self, vjp: LayerVjp) -> Rows:
        def rows(*operands: Any) -> Any:
            return self.output_rows_at(vjp.use.at.operand, operands[:-1], operands[-1])

        rows_at_all = vjp.use.detail.over(rows, self._arguments(vjp), vjp.cotangent)
        return self._side(vjp, rows_at_all, vjp.use.axes.outputs)

    def _arguments(self, vjp: LayerVjp) -> Sequence[Any]:
        return vjp.operands[: vjp.use.at.eqn.params["arguments"]]

    def _side(self, vjp: LayerVjp, x: ArrayOrShape, features: Axes) -> Rows:
        use, call = vjp.use, vjp.use.detail
        first = x.ndim - len(features)
        stack = (*call.stack_levels, *range(first - self._stacked(use), first))
        rows = tuple(d for d in range(first) if d not in stack)
        at = range(first, x.ndim)
        return Rows(x, rows, stack, tuple(zip(at, features, strict=True)))

    def _stacked(self, use: Use) -> int:
        return len(use.axes.stack) - len(use.detail.stack_levels)


@dataclasses.dataclass(frozen=True)
class _Mapped:
    """How a call is repeated: by ``vmap``, and over leading axes of its data.

    Attributes:
        levels: For each ``vmap``, outermost first, which operands have an axis of it.
        data: The operand with data.
        native: The number of further leading axes of the data, behind those of ``vmap``.
        parameter: The operand whose rows are meant.
    """

    levels: tuple[tuple[bool, ...], ...]
    data: int
    native: int
    parameter: int

    @classmethod
    def of(cls, eqn: Eqn, data: int, data_ndim: int, parameter: int) -> "_Mapped":
        levels = eqn.params["mapped"]
        ndim = len(eqn.invars[data].aval.shape) - sum(level[data] for level in levels)
        return cls(levels, data, ndim - data_ndim, parameter)

    @property
    def problem(self) -> str:
        """The reason why the rows of a use are not known, or an empty string."""
        if self.native < 0:
            return "meets data with fewer axes than one point has (data_ndim)"
        alone = any(not level[self.data] and not level[self.parameter] for level in self.levels)
        return "is mapped over by `vmap` without its data" if alone else ""

    @property
    def lead(self) -> int:
        """The number of axes in front of the result of one point."""
        return len(self.levels) + self.native

    @property
    def data_levels(self) -> int:
        return sum(level[self.data] for level in self.levels)

    @property
    def stack_levels(self) -> tuple[int, ...]:
        """The levels at which the parameter is mapped, too: each entry is a matrix of its own."""
        return tuple(k for k, level in enumerate(self.levels) if level[self.parameter])

    @property
    def row_axes_of_data(self) -> tuple[int, ...]:
        """The leading axes of the data that are rows."""
        of_data = [level for level in self.levels if level[self.data]]
        mapped = [d for d, level in enumerate(of_data) if not level[self.parameter]]
        return (*mapped, *range(len(of_data), len(of_data) + self.native))

    def in_front(self, operand: int) -> int:
        """The number of axes of an operand in front of those of one point."""
        mapped = sum(level[operand] for level in self.levels)
        return mapped + (self.native if operand == self.data else 0)

    def over(self, fn: Callable[..., Any], operands: Sequence[Any], *cotangent: Any) -> Any:
        """A function of one point, at all points; the cotangent has the axes of all levels."""
        native = [0 if k == self.data else None for k in range(len(operands))]
        for _ in range(self.native):
            fn = jax.vmap(fn, (*native, *(0 for _ in cotangent)))
        for level in reversed(self.levels):
            axes = (0 if has_axis else None for has_axis in level[: len(operands)])
            fn = jax.vmap(fn, (*axes, *(0 for _ in cotangent)))
        return fn(*operands, *cotangent)
