"""Kinds without an input side: each element of the parameter meets data by itself."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxkfac._jaxpr_compat import bind
from jaxkfac.interception import (
    Data,
    ElementDetail,
    Kind,
    LayerVjp,
    Reads,
    Use,
    UseSite,
    register_kind,
)
from jaxkfac.interception.values import (
    Atoms,
    Axes,
    AxisTable,
    Statistic,
    UseAxes,
    View,
    cuts_of,
    entry,
    pieces_of,
    statistic,
)
from jaxkfac.kinds._moments import sum_to
from jaxkfac.kinds._rows import ArrayOrShape, Rows, by_example, masked

# ---------------- the base class


@statistic
class ElementSquares(Statistic):
    """Squares of the gradient at each position, summed, and the number of positions."""

    count: Any = entry(0, default=None)
    squares: Any = entry(2, default=None)


@statistic
class ElementGradients(Statistic):
    """Gradients summed over the positions of each example, and the numbers of positions."""

    by_example: ClassVar[bool] = True
    counts: Any = entry(0, default=None)
    gradient: Any = entry(1, default=None)


class Elementwise(Kind):
    """A kind whose block is the diagonal of its gradients, or one dense matrix of them.

    A new kind defines how it is found (``find``), and ``gradient``.
    """

    elementwise = True

    rank = 2
    reads = Reads(complex=True)

    def with_result(self, use: Use, axes: Axes) -> Use:
        return dataclasses.replace(use, axes=use.axes._replace(result=axes))

    def gradient(self, vjp: LayerVjp) -> ArrayOrShape:
        """The parameter's gradient at each position, before any sum."""
        raise NotImplementedError(f"{self.name!r} has no gradient at a position")

    def elements(
        self,
        vjp: LayerVjp,
        like: ElementSquares | ElementGradients,
        examples: Atoms,
    ) -> ElementSquares | ElementGradients:
        """The statistics of the elements.

        Args:
            vjp: The use.
            like: Their shapes and dtypes.
            examples: The atoms of the example axis.
        """
        use, dtype, weights = vjp.use, jax.tree.leaves(like)[0].dtype, vjp.weights
        ones = masked(jnp.ones(vjp.cotangent.shape, dtype), weights)
        cotangent = masked(_in_dtype(vjp.cotangent, dtype), weights)
        gradient = self.gradient(dataclasses.replace(vjp, cotangent=cotangent))
        if vjp.derivative is not None:
            gradient = gradient * vjp.derivative.astype(gradient.dtype)
        # The cotangent g of a complex value z says that the loss changes by the real part of g dz.
        gradient = gradient.real if jnp.iscomplexobj(gradient) else gradient
        # Once more: in rows of padding, data and derivative may be NaN, and 0 * NaN is NaN.
        gradient = masked(gradient, weights)
        if isinstance(like, ElementSquares):
            shape = like.squares.shape
            lead = gradient.ndim - len(shape)
            # Features that share an element are summed before the square: a position has one
            # gradient, and counts once whatever their number (docs/conventions.md).
            shared = tuple(d for d in use.elements.features if d < lead or shape[d - lead] == 1)
            gradient = gradient.sum(shared, keepdims=True)
            ones = ones.max(shared, keepdims=True)
            at_positions = ElementSquares(ones, jnp.square(gradient))
            return jax.tree.map(lambda s, x: sum_to(x, s.shape), like, at_positions.only(like))
        at_positions = ElementGradients(ones, gradient).only(like)
        by_example = functools.partial(gradients_by_example, vjp, examples)
        return jax.tree.map(by_example, like, at_positions)


def _in_dtype(x: ArrayOrShape, dtype: jnp.dtype) -> Any:
    """``x`` in a real dtype, or if it is complex in the complex dtype of as many bits."""
    if jnp.iscomplexobj(x):
        return x.astype(jnp.complex128 if dtype.itemsize == 8 else jnp.complex64)
    return x.astype(dtype)


def gradients_by_example(
    vjp: LayerVjp, examples: Atoms, like: ArrayOrShape, gradient: ArrayOrShape
) -> ArrayOrShape:
    """Elementwise gradients summed over the positions of each example.

    Args:
        vjp: A scale or bias.
        examples: The atoms of the example axis.
        like: The sums, ``(parameter..., examples)``.
        gradient: Gradient at each position, with the axes of the result.
    """
    shape = like.shape[:-1]
    lead = gradient.ndim - len(shape)
    parameter_dims = [d for d in range(gradient.ndim) if d >= lead and shape[d - lead] != 1]
    rows = tuple(d for d in range(gradient.ndim) if d not in parameter_dims)
    side = Rows(gradient, rows, (), tuple((d, ()) for d in parameter_dims))
    axes = [vjp.use.axes.result[d] for d in rows]
    x = by_example(vjp, side, axes, examples).sum(1, dtype=like.dtype)
    return jnp.moveaxis(x.reshape(x.shape[0], *shape), 0, -1)


# ---------------- biases


@register_kind
class Bias(Elementwise):
    """A parameter added to data, or placed beside it.

    A bias that is added to a product may be joined to the product, if nothing else reads that. A
    class token put in front of data, or a table of positions, is a bias too.
    """

    name = "bias"
    primitives = frozenset("add add_any sub concatenate select_n dynamic_update_slice pad".split())
    suffix = "bias"
    inserts = True

    def find(self, table: AxisTable, at: UseSite, ins: Sequence[Any]) -> Use | str:
        view, name = ins[at.operand], at.eqn.primitive.name
        if name == "select_n" and at.operand == 0:
            return "is the predicate of `select_n`"
        rank = len(at.eqn.outvars[0].aval.shape)
        data = next((v for v in ins if isinstance(v, Data) and len(v.axes) == rank), None)
        # Other equations place the parameter in rows of its own, which always exist.
        if name not in ("add", "add_any", "sub", "select_n") or data is None:
            return Use(self, view, at)
        # Not `sub`: a column of ones in A stands for a bias that is added.
        products = data.product if name in ("add", "add_any") else ()
        its = (p for p in products if _is_its_bias(table, view, data.product_axes, p))
        axes, elements = UseAxes(rows=data.axes), ElementDetail(joint=next(its, None))
        return Use(self, view, at, data, axes, elements)

    def gradient(self, vjp: LayerVjp) -> ArrayOrShape:
        return vjp.cotangent


def _is_its_bias(
    table: AxisTable, view: View, product_axes: Sequence[Atoms | None], product: Use
) -> bool:
    """Whether the view's own axes coincide with the free axes of the product's parameter."""
    # The column of ones gives a joint bias the gradient of the product's rows, unchanged.
    if (
        view.axes is None
        or view.history.reversed
        or view.history.scaled
        or view.history.function
        or view.history.masked
    ):
        return False
    # In a scan, kernel and bias must be those of one iteration.
    if view.source.traced_indices != product.view.source.traced_indices:
        return False
    if len(view.axes) != len(product_axes):
        return False
    axes = [(mine, free or ()) for mine, free in zip(view.axes, product_axes, strict=True)]
    if any(_owned(table, mine) != _owned(table, free) for mine, free in axes):
        return False
    if not view.joins and not product.view.joins:
        return True
    # A part of a bias belongs to the part of a kernel that is at the same place.
    mine, its = (pieces_of(table, v.joins) for v in (view, product.view))
    if mine is None or its is None:
        return False
    return all(
        cuts_of(table, mine, axis) == cuts_of(table, its, free)
        and its.keys() >= set(table.atoms(free))
        for axis, free in axes
        if _owned(table, free) > 1
    )


def _owned(table: AxisTable, axis: Atoms) -> int:
    """The number of elements of the parameter itself along an axis."""
    atoms = table.atoms(axis)
    return math.prod(table.size(a) for a in atoms if "parameter" in table.kinds(a))


# ---------------- scales


@register_kind
class Scale(Elementwise):
    """A parameter times data, or another elementwise function of both.

    Its gradient at a position is the cotangent times the derivative there, which for a product is
    the data.
    """

    name = "scale"
    primitives = frozenset("mul div pow max min".split())
    suffix = "scale"

    def find(self, table: AxisTable, at: UseSite, ins: Sequence[Any]) -> Use | str:
        data = ins[1 - at.operand]
        return Use(self, ins[at.operand], at, data, UseAxes(rows=data.axes))

    def gradient(self, vjp: LayerVjp) -> ArrayOrShape:
        use, data, cotangent = vjp.use, vjp.data, vjp.cotangent
        if use.at.eqn.primitive.name == "mul":
            return cotangent * data.astype(cotangent.dtype)

        def of_parameter(x: ArrayOrShape) -> ArrayOrShape:
            return bind(use.at.eqn)(*((x, data) if use.at.operand == 0 else (data, x)))

        parameter = vjp.operands[use.at.operand]
        derivative = jax.jvp(of_parameter, [parameter], [jnp.ones_like(parameter)])[1]
        return cotangent * derivative.astype(cotangent.dtype)


# ---------------- parameters behind a computed weight


@register_kind
class Reparameterised(Elementwise):
    """The diagonal of a parameter behind a weight (weight norm, a merged adapter).

    It comes from a second pass over the examples. The use is found where the weight meets data,
    whatever equation reads the weight.
    """

    name = "reparameterised"
    suffix = "reparameterised"
    rank = 2
    reads = Reads(complex=True, contracts=True)
    covered = False

    def find(self, table: AxisTable, at: UseSite, ins: Sequence[Any]) -> Use | str:
        return "is behind a weight that is computed from it"

    def with_result(self, use: Use, axes: Axes) -> Use:
        return dataclasses.replace(use, axes=use.axes._replace(rows=axes, result=axes))


# ---------------- parameters that no other kind covers


@register_kind
class Uncovered(Elementwise):
    """A diagonal from a second pass. No equation is such a use: the parameters are reported."""

    name = "diagonal"
    suffix = "diagonal"
    covered = False

    def find(self, table: AxisTable, at: UseSite, ins: Sequence[Any]) -> Use | str:
        return "is covered by a second pass only"
