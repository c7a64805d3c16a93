"""Parameters that go through a function before a product: ``x @ softplus(w)``."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxkfac.interception import ElementDetail, LayerVjp, Reads, Use, UseSite, register_kind
from jaxkfac.interception.values import Atoms, AxisTable, UseAxes
from jaxkfac.kinds._elementwise import ElementGradients, ElementSquares, Elementwise
from jaxkfac.kinds._moments import sum_to
from jaxkfac.kinds._rows import ArrayOrShape, Rows, by_example


@register_kind
class Transformed(Elementwise):
    r"""The diagonal of a parameter behind a weight that is no matrix of it.

    An element of the weight connects one input feature $i$ and one output $j$, so its gradient at a
    row is $a_i g_j$, and the sum of squares over rows is one product of squared rows. If an element
    of the parameter is in several elements of the weight (a gain for its columns), its gradient at
    a row is a sum of these, and the gradients of examples are squared instead.

    Memory:
        By example, one weight for each example.
    """

    name = "transformed"
    suffix = "transformed"
    rank = 2
    reads = Reads(contracts=True)

    def find(self, table: AxisTable, at: UseSite, ins: Sequence[Any]) -> Use | str:
        position = at.operand
        contract, batch = at.eqn.params["dimension_numbers"]
        # The other axes of the data are rows: each has a gradient of its own.
        theirs = {*contract[1 - position], *batch[1 - position]}
        data = ins[1 - position]
        rows = tuple(a for d, a in enumerate(data.axes) if d not in theirs)
        view = ins[position]
        whole_examples = view.axes is None or any(
            "broadcast" in table.kinds(a) for axis in view.axes for a in table.atoms(axis)
        )
        elements = ElementDetail(whole_examples=whole_examples)
        return Use(self, view, at, data, UseAxes(rows=rows), elements)

    def elements(
        self,
        vjp: LayerVjp,
        like: ElementSquares | ElementGradients,
        examples: Atoms,
    ) -> ElementSquares | ElementGradients:
        use, dtype = vjp.use, jax.tree.leaves(like)[0].dtype
        vjp = dataclasses.replace(vjp, cotangent=vjp.cotangent.astype(dtype))
        x, g = (side.masked(vjp.weights) for side in _sides(vjp))
        ones = [side._replace(x=jnp.ones_like(side.x)) for side in (x, g)]
        # The count of an element is the number of rows that exist, from the same product with ones.
        ones[1] = ones[1].masked(vjp.weights)
        by_row = isinstance(like, ElementSquares)

        def gradients(x: Rows, g: Rows) -> ArrayOrShape:
            """Gradients of the weight by example; the examples are the last axis."""
            if by_row:
                return _product(use, _flat(x), _flat(g))[..., 0]
            return _product(
                use, *(by_example(vjp, side, use.axes.rows, examples) for side in (x, g))
            )

        d = None if vjp.derivative is None else vjp.derivative.astype(dtype)
        if by_row:
            squares = gradients(*(side._replace(x=jnp.square(side.x)) for side in (x, g)))
            # The derivative does not depend on the row, so it is applied once, to the sum.
            squares = squares if d is None else squares * jnp.square(d)
            statistics = ElementSquares(gradients(*ones), squares).only(like)
        else:
            gradient = gradients(x, g)
            gradient = gradient if d is None else gradient * d[..., None]
            statistics = ElementGradients(gradients(*ones), gradient).only(like)
        return jax.tree.map(lambda s, x: sum_to(x, s.shape), like, statistics)


def _sides(vjp: LayerVjp) -> tuple[Rows, Rows]:
    """Input rows and output rows, with features in the order of the equation."""
    use, cotangent = vjp.use, vjp.cotangent
    x = vjp.data.astype(cotangent.dtype)
    contract, shared = use.at.eqn.params["dimension_numbers"]
    data_operand, batch = 1 - use.at.operand, len(shared[0])
    not_rows = {*contract[data_operand], *shared[data_operand]}
    rows = tuple(d for d in range(x.ndim) if d not in not_rows)
    features = tuple((d, ()) for d in contract[data_operand])
    inputs = Rows(x, rows, tuple(shared[data_operand]), features)
    free = cotangent.ndim - batch - len(rows)
    first_row, first_free = batch, batch + len(rows)
    if use.at.operand == 0:
        first_row, first_free = batch + free, batch
    outputs = Rows(
        cotangent,
        tuple(range(first_row, first_row + len(rows))),
        tuple(range(batch)),
        tuple((d, ()) for d in range(first_free, first_free + free)),
    )
    return inputs, outputs


def _flat(side: Rows) -> ArrayOrShape:
    """``(1, rows, stack..., features...)``."""
    x = side.x.transpose(*side.rows, *side.batch, *side.feature_axes)
    return x.reshape(1, side.number, *x.shape[len(side.rows) :])


def _product(use: Use, x: ArrayOrShape, g: ArrayOrShape) -> ArrayOrShape:
    """Sums over rows of ``(examples, rows, ...)``, in the weight's axes, with examples last."""
    contract, shared = use.at.eqn.params["dimension_numbers"]
    batch = tuple(range(2, 2 + len(shared[0])))
    numbers = (((1,), (1,)), ((0, *batch), (0, *batch)))
    out = jax.lax.dot_general(x, g, numbers, precision=jax.lax.Precision.HIGHEST)
    mine = (*shared[use.at.operand], *contract[use.at.operand])
    ndim = len(use.at.eqn.invars[use.at.operand].aval.shape)
    # `dot_general` returns shared axes first, then inputs, then outputs; the weight has its own
    # order.
    order = [*mine, *(d for d in range(ndim) if d not in mine)]  # the weight's axis for each of out
    return out.transpose(*(1 + order.index(d) for d in range(ndim)), 0)
