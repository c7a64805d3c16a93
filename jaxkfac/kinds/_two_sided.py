"""The base class of kinds with a Kronecker block, which have input rows and output rows."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxkfac.interception import Kind, LayerVjp
from jaxkfac.interception.values import Atoms
from jaxkfac.kinds._both_sides import BothSides
from jaxkfac.kinds._moments import InputMoments, Products, input_moments, sum_of_outer_products
from jaxkfac.kinds._rows import ArrayOrShape, Rows, aligned, part_of_rows, split_examples


class TwoSided(Kind):
    """A kind whose parameter is a matrix between input rows and output rows.

    A new kind defines how it is found (``find``, ``reading``), and ``inputs`` and ``outputs``.

    Attributes:
        packs_inputs: Whether the input rows form a matrix, so that panels of their second moment
            can be gathered.
    """

    packs_inputs: ClassVar[bool] = False

    def inputs(self, vjp: LayerVjp) -> Rows:
        """The input rows of a use, all of them."""
        raise NotImplementedError

    def outputs(self, vjp: LayerVjp) -> Rows:
        """The cotangent of the result as rows."""
        raise NotImplementedError

    def input_rows(self, vjp: LayerVjp) -> Rows:
        """The rows that a use reads; rows that do not exist are zero."""
        return part_of_rows(vjp, self.inputs(vjp).masked(vjp.weights))

    def output_rows(self, vjp: LayerVjp) -> Rows:
        """The cotangent of the result; rows that do not exist are zero."""
        return part_of_rows(vjp, self.outputs(vjp).masked(vjp.weights))

    def reached(self, vjp: LayerVjp) -> ArrayOrShape | None:
        """Which rows reach which entry of the stack, ``(stack, rows...)``; ``None`` if all do.

        A row that does not reach an entry is zero among the rows of that entry.
        """
        return None

    def summed_input_rows(self, vjp: LayerVjp) -> Rows:
        """Input rows for a caller that needs only their sums over positions.

        A kind may return rows that are already summed.
        """
        return self.input_rows(vjp)

    def over_input_rows(
        self, vjp: LayerVjp, statistic: Callable[[Rows, ArrayOrShape | None], Any]
    ) -> Any:
        """A statistic of input rows, summed over the chunks in which the rows are formed.

        Args:
            vjp: The use and its operands.
            statistic: A function from rows, and which of them exist, to a tree of arrays that are
                sums over rows. Rows that do not exist are zero.
        """
        return statistic(self.input_rows(vjp), vjp.weights)

    def input_moments(self, vjp: LayerVjp, like: InputMoments, products: Products) -> InputMoments:
        """The statistics of the input side, by position."""

        def sums(side: Rows, exists: ArrayOrShape | None) -> InputMoments:
            return input_moments(vjp, like, side, exists, products)

        out, exists = self.over_input_rows(vjp, sums), self.reached(vjp)
        if exists is None:
            return out
        # A row that does not reach an expert is zero in its sum, so its count leaves the row out.
        if vjp.weights is not None:
            weights = vjp.weights.astype(like.count.dtype)
            exists = jnp.where(exists, weights, jnp.zeros((), weights.dtype))
        lead, stack = exists.ndim - len(vjp.use.axes.rows), like.count.shape
        count = exists.sum(range(lead, exists.ndim), dtype=like.count.dtype)
        count = count.reshape(*count.shape, *(1,) * (len(stack) - lead))
        return dataclasses.replace(out, count=jnp.broadcast_to(count, stack))

    def second_moment(self, side: Rows, precision: jax.lax.PrecisionLike) -> ArrayOrShape:
        """The sum of outer products of rows."""
        return sum_of_outer_products(side, precision)

    def both_sides(self, vjp: LayerVjp, examples: Atoms | None, stack: tuple[int, ...]) -> Any:
        """Both sides of a use by example.

        Args:
            vjp: The use, its operands and its cotangent.
            examples: The atoms of the example axis; ``None`` if examples need not be separated.
            stack: Shape of the stacked axes.

        Raises:
            LostRowsError: the rows cannot be attributed to examples.
        """
        num_rows = len(vjp.use.axes.rows)
        split = functools.partial(split_examples, vjp, num_rows=num_rows, examples=examples)
        g = aligned(vjp, self.output_rows(vjp), stack)
        x = aligned(vjp, self.input_rows(vjp), stack)
        if examples is None:
            return BothSides((x, g), by_example=False)
        return BothSides((split(x), split(g)), by_example=True)
