"""Convolutions: every output position is a row that reads one patch of the signal."""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxkfac.interception import LayerVjp, Use, UseSite, register_kind, reversal
from jaxkfac.interception.values import Atoms, Axes, AxisTable, UseAxes
from jaxkfac.kinds import _moments
from jaxkfac.kinds._both_sides import Arrays, BothSides
from jaxkfac.kinds._patches import KernelOrder, over_patches, patches_of, summed_patches
from jaxkfac.kinds._rows import (
    ArrayOrShape,
    Rows,
    aligned,
    matrix_problem,
    order_problem,
    part_of_rows,
    split_examples,
)
from jaxkfac.kinds._two_sided import TwoSided


@register_kind
class Convolution(TwoSided):
    """Channels and kernel points are inputs; feature groups are a stack.

    All patches together would be one copy of the signal for each point of the kernel. Statistics
    are therefore summed over runs of positions.
    """

    name = "conv"
    primitives = frozenset(("conv_general_dilated",))
    suffix = "transposed"
    product = True

    def find(self, table: AxisTable, at: UseSite, ins: Sequence[Any]) -> Use | str:
        eqn, view, p = at.eqn, ins[at.operand], at.eqn.params
        if at.operand != 1:
            return "is the signal, not the kernel, of `conv_general_dilated`"
        # Its outputs come from different examples for different channels.
        if p["batch_group_count"] != 1:
            return "is the kernel of a `conv_general_dilated` whose examples are grouped"
        if problem := matrix_problem(table, view, "conv_general_dilated"):
            return problem
        numbers, groups = p["dimension_numbers"], p["feature_group_count"]
        out, channels, *spatial = (view.axes[d] for d in numbers.rhs_spec)
        order = [reversal(table, view, axis) for axis in spatial]
        # A reversal along a full axis only renumbers the kernel's points, and `reversed` keeps it;
        # along part of an axis it is left to the check of the order.
        straight = [out, channels, *(a for a, o in zip(spatial, order, strict=True) if o == "part")]
        if problem := order_problem(table, view, straight, "conv_general_dilated"):
            return problem
        outputs = eqn.invars[1].aval.shape[numbers.rhs_spec[0]]
        # The outputs of a grouped convolution are in the order of the groups.
        group_axes = table.regroup([out], [groups, outputs // groups])
        if group_axes is None:
            return (
                f"has outputs that do not split into the {groups} groups of `conv_general_dilated`"
            )
        # Groups are blocks of their own: no patch of one group meets a kernel of another.
        group_atoms = table.atoms(group_axes[0])
        axes = UseAxes(
            inputs=(channels, *spatial),
            outputs=(group_axes[1],),
            stack=tuple((a,) for a in group_atoms),
        )
        kernel_order = KernelOrder(
            tuple(map(table.size, group_atoms)), tuple(o == "whole" for o in order)
        )
        return Use(self, view, at, ins[0], axes, detail=kernel_order)

    def with_result(self, use: Use, axes: Axes) -> Use:
        numbers = use.at.eqn.params["dimension_numbers"]
        rows = tuple(axes[d] for d in (numbers.out_spec[0], *numbers.out_spec[2:]))
        return dataclasses.replace(use, axes=use.axes._replace(rows=rows))

    def product_axes(self, use: Use, ndim: int) -> tuple[Atoms | None, ...]:
        out: list[Atoms | None] = [None] * ndim
        channels = tuple(a for axis in (*use.axes.stack, *use.axes.outputs) for a in axis)
        out[use.at.eqn.params["dimension_numbers"].out_spec[1]] = channels
        return tuple(out)

    def reading(self, use: Use, place: Callable[[Atoms], list[int]]) -> str:
        p = use.at.eqn.params
        keys = ("window_strides", "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers")
        inputs = [place(a) for a in use.axes.inputs]
        kernel = use.at.eqn.invars[1].aval.shape
        # The kernel's size is part of how the signal is read: convolutions of 1 and 3 points with
        # the same strides read other patches.
        sizes = [kernel[d] for d in p["dimension_numbers"].rhs_spec[1:]]
        return repr((*(p[k] for k in keys), inputs, sizes, use.detail))

    def signature(self, use: Use) -> Hashable:
        return use.detail

    def inputs(self, vjp: LayerVjp) -> Rows:
        """All patches; pass only a few examples at a time."""
        return patches_of(vjp)

    def outputs(self, vjp: LayerVjp) -> Rows:
        use, cotangent = vjp.use, vjp.cotangent
        examples, channels, *spatial = vjp.site.eqn.params["dimension_numbers"].out_spec
        groups, shape = len(use.detail.groups), cotangent.shape
        x = cotangent.reshape(*shape[:channels], *use.detail.groups, -1, *shape[channels + 1 :])
        # The split of the channels into groups moves the axes behind them.
        rows = tuple(d + groups if d > channels else d for d in (examples, *spatial))
        batch = tuple(range(channels, channels + groups))
        return Rows(x, rows, batch, ((channels + groups, use.axes.outputs[0]),))

    def over_input_rows(
        self, vjp: LayerVjp, statistic: Callable[[Rows, ArrayOrShape | None], Any]
    ) -> Any:
        return over_patches(vjp, lambda side, exists: statistic(part_of_rows(vjp, side), exists))

    def summed_input_rows(self, vjp: LayerVjp) -> Rows:
        return part_of_rows(vjp, summed_patches(vjp))

    def second_moment(self, side: Rows, precision: jax.lax.PrecisionLike) -> ArrayOrShape:
        return _moments.sum_over_patches(side, precision)

    def both_sides(
        self, vjp: LayerVjp, examples: Atoms | None, stack: tuple[int, ...]
    ) -> BothSides:
        """The two sides; patches are formed from the signal for one chunk of examples at a time."""
        numbers = vjp.site.eqn.params["dimension_numbers"]
        first = (numbers.lhs_spec[0], numbers.out_spec[0], 0)
        kernel, lead = vjp.operands[1], len(vjp.use.axes.rows)
        # Only examples are rows while chunks are cut: the positions of signal and outputs differ in
        # number.
        example_rows = vjp.use.axes._replace(rows=vjp.use.axes.rows[:1])
        alone = dataclasses.replace(vjp, use=dataclasses.replace(vjp.use, axes=example_rows))

        def examples_first(x: ArrayOrShape, axis: int) -> ArrayOrShape:
            """Move the batch axis first and split it into examples and the rest of its entries."""
            return split_examples(alone, jnp.moveaxis(x, axis, 0), num_rows=1, examples=examples)

        arrays = tuple(
            None if x is None else examples_first(x, axis)
            for x, axis in zip((vjp.data, vjp.cotangent, vjp.weights), first, strict=True)
        )

        def rows(chunk: Arrays) -> tuple[ArrayOrShape, ArrayOrShape]:
            size = len(jax.tree.leaves(chunk)[0])
            signal, outputs, exists = (
                None if x is None else jnp.moveaxis(x.reshape(-1, *x.shape[2:]), 0, axis)
                for x, axis in zip(chunk, first, strict=True)
            )
            assert outputs is not None
            part = LayerVjp(vjp.site, vjp.use, [signal, kernel], outputs, exists)
            x, g = aligned(part, self.input_rows(part)), aligned(part, self.output_rows(part))
            return x.reshape(size, -1, *x.shape[lead:]), g.reshape(size, -1, *g.shape[lead:])

        return BothSides(arrays, examples is not None, rows)
