"""Both sides of a layer use by example: gradients, their squares, their products.

A convolution's patches exist for only one chunk of examples at a time; otherwise the signal stands
for them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array

from jaxkfac.interception.values import Statistic, entry, statistic
from jaxkfac.kinds._squares import (
    ArrayOrShape,
    Basis,
    gradients,
    over_pairs,
    rotate,
    rotate_inputs,
    rotate_outputs,
    squares_by_example,
    squares_by_row,
    weighed_squares,
)
from jaxkfac.linalg import map_over_chunks

# What is cut into chunks along its first axis: both sides, or a signal, its cotangent and a mask.
Arrays = tuple[ArrayOrShape | None, ...]

# ---------------- chunks of examples, so that not all gradients or rows are alive at once


# Bytes of the explicit gradients and rows that are alive at once.
CHUNK_BYTES = 32 * 2**20


def sum_over_strided_chunks(fn: Callable[[Any], Any], arrays: Arrays, size: int) -> Any:
    """The sum of ``fn``, a tree, over chunks of the leading axis of at most ``size`` entries.

    A chunk takes entries a stride apart, so that an axis that is split over devices is not moved
    between them.
    """
    number = jax.tree.leaves(arrays)[0].shape[0]
    size = max(1, min(size, number))
    steps = number // size
    if steps == 1 and size == number:
        return fn(arrays)
    # The remainder is taken from the end and summed first, outside the loop, whose chunks must be
    # of one size.
    divisible = size * steps
    body = jax.tree.map(lambda x: x[:divisible].reshape(size, steps, *x.shape[1:]), arrays)

    def chunk(index: ArrayLike) -> Arrays:
        return jax.tree.map(
            lambda x: jax.lax.dynamic_index_in_dim(x, index, 1, keepdims=False), body
        )

    total = fn(jax.tree.map(lambda x: x[divisible:], arrays) if divisible < number else chunk(0))
    return jax.lax.scan(
        lambda total, index: (jax.tree.map(jnp.add, total, fn(chunk(index))), None),
        total,
        jnp.arange(0 if divisible < number else 1, steps),
    )[0]


def one_by_one_on_cpu(fn: Callable[[Any, int], Any], arrays: Arrays, at_once: int) -> Any:
    """``fn(arrays, at_once)``; on the CPU ``at_once`` is one example.

    XLA's CPU backend has a fast product for the gradient of one example, but not for a batch: 2048
    rows, eight for each example, with sides of 512 take 61 ms one by one, and 778 ms two at a time.
    """
    return jax.lax.platform_dependent(
        arrays, cpu=lambda arrays: fn(arrays, 1), default=lambda arrays: fn(arrays, at_once)
    )


# ---------------- rows of a matrix layer


_EXACT = jax.lax.Precision.HIGHEST  # never TF32: scores add terms of both signs, which cancel


class LowRankMatrices(NamedTuple):
    """Matrices in the form of products of two factors.

    Attributes:
        left: ``(stack..., queries, in, rank)``.
        right: ``(stack..., queries, rank, out)``.
    """

    left: ArrayOrShape
    right: ArrayOrShape


@statistic
class BasisSquares(Statistic):
    """Sums of squared gradients in a basis: ``(stack..., in, out)``, and those of a bias.

    A constant factor is in the gradient before it is squared.
    """

    weight: Any = entry(0)
    bias: Any = entry(0, default=None)

    @property
    def stack(self) -> tuple[int, ...]:
        return self.weight.shape[:-2]


@statistic
class Gradients(Statistic):
    """Gradients by example: ``(stack..., examples, in, out)``, and those of a bias."""

    weight: Any = entry(1)
    bias: Any = entry(0, default=None)

    @property
    def stack(self) -> tuple[int, ...]:
        return self.weight.shape[:-3]


@statistic
class Scores(Statistic):
    """Inner products with queries: ``(stack..., queries, examples)``, and those of a bias."""

    weight: Any = entry(1)
    bias: Any = entry(0, default=None)

    @property
    def stack(self) -> tuple[int, ...]:
        return self.weight.shape[:-2]


@statistic
class RowSums(Statistic):
    """One row for each example, ``(stack..., examples, n)``, that depends on no constant factor."""

    rows: Any = entry(0)

    @property
    def stack(self) -> tuple[int, ...]:
        return self.rows.shape[:-2]


@dataclasses.dataclass(frozen=True)
class BothSides:
    """Input rows and output rows of one use of a dense layer or convolution.

    Attributes:
        arrays: Arrays that are cut into chunks along their leading axis: the rows, or what they are
            computed from.
        by_example: Whether the rows are ``(examples, positions, stack..., features)``; otherwise
            they are ``(rows..., stack..., features)``, with any row axes.
        rows: A function from a chunk to input and output rows; ``None`` if the arrays are the rows.
    """

    arrays: Arrays
    by_example: bool
    rows: Callable[[Arrays], tuple[ArrayOrShape, ArrayOrShape]] | None = None

    def both_rows(self) -> tuple[ArrayOrShape, ArrayOrShape]:
        """Input rows and output rows; of a convolution, all patches."""
        return self._rows(self.arrays)

    def squares(self, like: BasisSquares, basis: Basis) -> BasisSquares:
        """Sums of squares in a basis.

        Memory:
            The rows and the gradients of examples, where these have to be formed: together
            ``CHUNK_BYTES``, or what one example takes.
        """
        stack = like.weight.ndim - 2

        def sums_of_chunk(chunk: Arrays) -> BasisSquares:
            x, g = self._rows(chunk)
            lead = x.ndim - 1 - stack
            if self.by_example:
                weight = squares_by_example(x, g, basis)
            else:
                weight = squares_by_row(x, g, basis, lead)
            if like.bias is None:
                return BasisSquares(weight)
            if self.by_example:
                g = g.sum(1, keepdims=True, dtype=like.bias.dtype)
            squares = jnp.square(rotate_outputs(g, basis, lead))
            return BasisSquares(weight, squares.sum(range(stack, stack + lead)))

        x, g = jax.eval_shape(self._rows, self.arrays)
        gradients = self.by_example and not over_pairs(x.shape[1])
        # Squares of rows need no gradients and no patches, so there is nothing to cut into chunks.
        if self.rows is None and not gradients:
            return sums_of_chunk(self.arrays)
        chunked = functools.partial(sum_over_strided_chunks, sums_of_chunk)
        at_once = self._at_once(x, g, gradients=gradients)
        if not gradients:
            return chunked(self.arrays, at_once)
        return one_by_one_on_cpu(chunked, self.arrays, at_once)

    def gradients(self, like: Gradients, basis: Basis | None = None) -> Gradients:
        """Gradients by example, in a basis, or in the parameters' own coordinates.

        The gradient of a bias that is not joint is in its own coordinates in both cases.
        """
        # An empty basis leaves the rows as they are.
        eigenbasis = Basis() if basis is None else basis

        def gradients_of_example(example: Arrays) -> Gradients:
            # The functions of rows expect the axis of examples that `lax.map` has removed.
            x, g = self._rows(jax.tree.map(lambda y: y[None], example))
            bias = None if like.bias is None else g.sum((0, 1), dtype=like.bias.dtype)
            return Gradients(gradients(x, g, eigenbasis)[..., 0, :, :], bias)

        x, g = jax.eval_shape(self._rows, self.arrays)
        mapped = one_by_one_on_cpu(
            lambda arrays, at_once: jax.lax.map(gradients_of_example, arrays, batch_size=at_once),
            self.arrays,
            self._at_once(x, g, gradients=True),
        )
        return jax.tree.map(lambda x: jnp.moveaxis(x, 0, len(like.stack)), mapped)

    def scores(
        self,
        like: Scores,
        queries: ArrayOrShape | LowRankMatrices,
        bias_queries: ArrayOrShape | None,
    ) -> Scores:
        r"""Inner products $\langle W_q, \Gamma_n \rangle$ with the examples' gradients.

        With one position, one query, or queries of low rank, the rows are multiplied by the queries
        and no gradient is formed. Otherwise the gradients of some examples at a time are formed,
        and multiplied once.

        Args:
            like: Shapes of the result.
            queries: ``(stack..., queries, in, out)``, or two factors of it.
            bias_queries: ``(stack..., queries, out)``.

        Memory:
            ``CHUNK_BYTES``, or what one example takes.
        """
        # Only shapes are asked for: forming the rows of a convolution would make all patches of the
        # batch.
        x, g = jax.eval_shape(self._rows, self.arrays)
        positions, n_in, n_out = x.shape[1], x.shape[-1], g.shape[-1]
        first = queries.left if isinstance(queries, LowRankMatrices) else queries
        dtype, number = first.dtype, first.shape[-3]

        def cast_rows(chunk: Arrays) -> tuple[ArrayOrShape, ArrayOrShape]:
            x, g = (jnp.moveaxis(y.astype(dtype), (0, 1), (-3, -2)) for y in self._rows(chunk))
            return x, g

        def by_rows(chunk: Arrays) -> ArrayOrShape:
            x, g = cast_rows(chunk)
            moved = jnp.einsum("...nsi,...qio->...qnso", x, queries, precision=_EXACT)
            return jnp.einsum("...qnso,...nso->...qn", moved, g, precision=_EXACT)

        def by_two_factors(chunk: Arrays) -> ArrayOrShape:
            assert isinstance(queries, LowRankMatrices)
            x, g = cast_rows(chunk)
            x = jnp.einsum("...nsi,...qir->...nsqr", x, queries.left, precision=_EXACT)
            g = jnp.einsum("...nso,...qro->...nsqr", g, queries.right, precision=_EXACT)
            return jnp.einsum("...nsqr,...nsqr->...qn", x, g, precision=_EXACT)

        def by_gradients(chunk: Arrays) -> ArrayOrShape:
            some = dataclasses.replace(self, arrays=chunk)
            shape = (*first.shape[:-3], len(jax.tree.leaves(chunk)[0]), n_in, n_out)
            like_gradients = Gradients(jax.ShapeDtypeStruct(shape, dtype))
            gradient = some.gradients(like_gradients).weight.astype(dtype)
            return jnp.einsum("...nio,...qio->...qn", gradient, queries, precision=_EXACT)

        if isinstance(queries, LowRankMatrices):
            # `size` is what one example adds to the intermediate results, in elements; it decides
            # how many examples a chunk has.
            product, size = by_two_factors, 2 * positions * number * queries.left.shape[-1]
        elif positions == 1 or number == 1:
            # With one position or one query, multiplying the rows by the queries takes no more
            # operations than forming each gradient and multiplying it, and writes no gradient.
            product, size = by_rows, positions * (number * n_out + n_in)
        else:
            product, size = by_gradients, n_in * n_out

        def scores_of_chunk(chunk: Arrays, _: Array | None) -> Scores:
            weight, bias = product(chunk), None
            if bias_queries is not None:
                g = jnp.moveaxis(self._rows(chunk)[1].sum(1, dtype=dtype), 0, -2)
                bias = jnp.einsum("...no,...qo->...qn", g, bias_queries, precision=_EXACT)
            return jax.tree.map(lambda y: jnp.moveaxis(y, -1, 0), Scores(weight, bias))

        size *= math.prod(first.shape[:-3])
        at_once = max(1, min(len(x), CHUNK_BYTES // (4 * size)))
        scores = map_over_chunks(scores_of_chunk, self.arrays, at_once)
        return jax.tree.map(lambda y: jnp.moveaxis(y, 0, -1), scores)

    def own_products(
        self,
        like: RowSums,
        basis: Basis,
        scale: ArrayOrShape,
        bias_scale: ArrayOrShape | None,
    ) -> RowSums:
        r"""$\sum_{ij} s_{ij} \Gamma_{n,ij}^2$: the product of each example's gradient with itself.

        Args:
            like: Shape of the result, one number for each example.
            basis: The eigenbasis.
            scale: $s$, ``(stack..., in[+1], out)``.
            bias_scale: The scale of a bias with its own block, ``(stack..., out)``.

        Memory:
            ``CHUNK_BYTES``, or the gradient of one example; for one position, some copies of rows.
        """

        def products_of(arrays: Arrays) -> ArrayOrShape:
            x, g = self._rows(arrays)
            products = weighed_squares(x, g, basis, scale)
            if bias_scale is None:
                return products
            summed = g.sum(1, keepdims=True, dtype=like.rows.dtype)
            g = rotate(summed, basis.g, 2)[..., 0, :]
            bias_products = jnp.square(g) * bias_scale[..., None, :].astype(g.dtype)
            return products + bias_products.sum(-1).astype(products.dtype)

        def one(example: Arrays) -> ArrayOrShape:
            return products_of(jax.tree.map(lambda y: y[None], example))[..., 0]

        x, g = jax.eval_shape(self._rows, self.arrays)
        if x.shape[1] == 1:
            products = products_of(self.arrays)
        else:
            mapped = one_by_one_on_cpu(
                lambda arrays, at_once: jax.lax.map(one, arrays, batch_size=at_once),
                self.arrays,
                self._at_once(x, g, gradients=True),
            )
            products = jnp.moveaxis(mapped, 0, -1)
        return RowSums(products[..., None].astype(like.rows.dtype))

    def scaled_outputs(
        self,
        basis: Basis,
        scale: ArrayOrShape,
        bias_scale: ArrayOrShape | None,
    ) -> RowSums:
        r"""Output rows $\sqrt{w} \odot \tilde g$ instead of gradients, for single positions.

        The gradient is then $\tilde a \tilde g^\top$. For two gradients of one example, the product
        weighted by $D$ is $\sum_j w_j \tilde g_j \tilde g'_j$ with
        $w_j = \sum_i \tilde a_i^2 D_{ij}$.

        Args:
            basis: The eigenbasis.
            scale: $D$, ``(stack..., in[+1], out)``.
            bias_scale: The scale of a bias with its own block, ``(stack..., out)``; it adds to $w$.
        """
        x, g = self._rows(self.arrays)
        # The axis of positions has length one here, and is dropped.
        x, g = rotate_inputs(x, basis, 2)[..., 0, :], rotate(g, basis.g, 2)[..., 0, :]
        weights = jnp.matmul(jnp.square(x), scale.astype(x.dtype), precision=_EXACT)
        if bias_scale is not None:
            weights = weights + bias_scale.astype(x.dtype)[..., None, :]
        return RowSums(jnp.sqrt(weights) * g.astype(weights.dtype))

    def _rows(self, chunk: Arrays) -> tuple[ArrayOrShape, ArrayOrShape]:
        if self.rows is not None:
            return self.rows(chunk)
        x, g = chunk
        assert x is not None and g is not None
        return x, g

    def _at_once(self, x: ArrayOrShape, g: ArrayOrShape, *, gradients: bool) -> int:
        size = (x.size + g.size) // len(x)
        if gradients:
            size = max(size, math.prod(g.shape[2:]) * x.shape[-1])
        return max(1, min(len(x), CHUNK_BYTES // (4 * size)))
