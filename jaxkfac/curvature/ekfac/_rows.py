"""Both sides of a layer use, example by example: what EKFAC multiplies before it squares.

A convolution's patches exist for one chunk of examples at a time; until then the signal
stands for them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxkfac.curvature.ekfac._squares import (
    CHUNK_BYTES,
    Array,
    Basis,
    gradients,
    over_pairs,
    rotate,
    scaled,
    squares_by_example,
    squares_by_row,
    squares_by_token,
    sum_over_chunks,
)
from jaxkfac.factors._moments import tokens_of
from jaxkfac.factors._rows import Rows, by_example, in_own_order
from jaxkfac.factors._taps import Slot
from jaxkfac.factors._use_rows import input_rows, output_rows
from jaxkfac.interception._axes import Atoms
from jaxkfac.interception._rewrite import Site
from jaxkfac.interception._values import Use


@dataclasses.dataclass(frozen=True)
class BothSides:
    """Input rows and output rows of one use of a dense layer or convolution.

    Attributes:
        arrays: What is cut into chunks along its leading axis: rows, or what makes them.
        by_example: Whether the rows are ``(examples, positions, stack..., features)``; else
            they are ``(rows..., stack..., features)``, with any row axes.
        rows: From a chunk to input and output rows; ``None`` where the arrays are the rows.
    """

    arrays: Any
    by_example: bool
    rows: Callable[[Any], tuple[Array, Array]] | None = None

    def squares(self, like: Slot, basis: Basis) -> Slot:
        """Sums of squares in a basis.

        Memory:
            Rows that have to be formed, and gradients of examples where they are: together
            ``CHUNK_BYTES``, or those of one example.
        """
        stack = like["squares"].ndim - 2

        def part(chunk: Any) -> Slot:
            x, g = self._rows(chunk)
            lead = x.ndim - 1 - stack
            if self.by_example:
                out = {"squares": squares_by_example(x, g, basis)}
            else:
                out = {"squares": squares_by_row(x, g, basis, lead)}
            if "bias_squares" in like:
                if self.by_example:
                    g = g.sum(1, keepdims=True, dtype=like["bias_squares"].dtype)
                squares = jnp.square(rotate(g, basis.g, lead))
                out["bias_squares"] = squares.sum(range(stack, stack + lead))
            return out

        x, g = jax.eval_shape(self._rows, self.arrays)
        gradients = self.by_example and not over_pairs(x.shape[1])
        if self.rows is None and not gradients:
            return part(self.arrays)
        chunked = functools.partial(sum_over_chunks, part)
        at_once = self._at_once(x, g, gradients=gradients)
        if not gradients:
            return chunked(self.arrays, at_once)
        return one_by_one_on_cpu(chunked, self.arrays, at_once)

    def gradients(self, like: Slot) -> Slot:
        """Gradients by example, in the parameters' own coordinates."""

        def part(example: Any) -> Slot:
            x, g = self._rows(jax.tree.map(lambda y: y[None], example))
            out = {"gradients": gradients(x, g, Basis())[..., 0, :, :]}
            if "bias_gradients" in like:
                out["bias_gradients"] = g.sum((0, 1), dtype=like["bias_gradients"].dtype)
            return out

        x, g = jax.eval_shape(self._rows, self.arrays)
        mapped = one_by_one_on_cpu(
            lambda arrays, at_once: jax.lax.map(part, arrays, batch_size=at_once),
            self.arrays,
            self._at_once(x, g, gradients=True),
        )
        return {
            key: jnp.moveaxis(mapped[key], 0, s.ndim - (3 if key == "gradients" else 2))
            for key, s in like.items()
        }

    def _rows(self, chunk: Any) -> tuple[Array, Array]:
        return chunk if self.rows is None else self.rows(chunk)

    def _at_once(self, x: Array, g: Array, *, gradients: bool) -> int:
        size = (x.size + g.size) // len(x)
        if gradients:
            size = max(size, math.prod(g.shape[2:]) * x.shape[-1])
        return max(1, min(len(x), CHUNK_BYTES // (4 * size)))


@dataclasses.dataclass(frozen=True)
class TokenRows:
    """Tokens and output rows of one use of an embedding.

    Attributes:
        tokens: ``(examples, positions)``; with one position each, where examples need not be
            told apart.
        g: ``(examples, positions, features)``.
    """

    tokens: Array
    g: Array

    def squares(self, like: Slot, basis: Basis) -> Slot:
        """Sums of squares in a basis.

        Memory:
            Some copies of the output rows.
        """
        g = rotate(scaled(self.g, basis), basis.g, 2)
        return {"squares": squares_by_token(self.tokens, g, like["squares"].shape[0])}

    def gradients(self, like: Slot) -> Slot:
        """Gradients by example: whole tables."""
        table = like["gradients"]
        examples = jnp.arange(len(self.tokens))[:, None]
        rows = self.g.astype(table.dtype)
        zeros = jnp.zeros(table.shape, table.dtype)
        return {"gradients": zeros.at[examples, self.tokens].add(rows, mode="drop")}


def both_sides(
    site: Site,
    use: Use,
    operands: Sequence[Any],
    cotangent: Array,
    weights: Array | None,
    examples: Atoms | None,
    like: Slot,
) -> BothSides | TokenRows:
    """Both sides of a dense layer, convolution or embedding.

    Args:
        site: The site of the use.
        use: The use.
        operands: Operands of the equation.
        cotangent: Of its result.
        weights: Which rows exist, with the axes of ``use.rows``.
        examples: The atoms of the example axis; ``None`` where examples need not be told
            apart.
        like: The slot, for the stack.

    Raises:
        LostRowsError: the rows cannot be told apart by example.
    """
    if use.kind == "conv":
        return _convolution(site, use, operands, cotangent, weights, examples)
    split = functools.partial(_split, site, use, num_rows=len(use.rows), examples=examples)
    stack = like["gradients"].shape[:-3] if "gradients" in like else like["squares"].shape[:-2]
    g = _aligned(site, use, output_rows(site, use, cotangent, weights), stack)
    if use.kind == "embedding":
        return TokenRows(split(tokens_of(use, operands)), split(g))
    x = _aligned(site, use, input_rows(site, use, operands, weights), stack)
    if examples is None:
        return BothSides((x, g), by_example=False)
    return BothSides((split(x), split(g)), by_example=True)


def one_by_one_on_cpu(fn: Callable[[Any, int], Any], arrays: Any, at_once: int) -> Any:
    """``fn(arrays, at_once)``, with one example at once on the CPU.

    XLA's CPU backend has a fast product for one example's gradient, not for a batch of them:
    2048 rows, eight an example, sides 512: 61 ms one by one, and 778 two at a time.
    """
    return jax.lax.platform_dependent(
        arrays, cpu=lambda arrays: fn(arrays, 1), default=lambda arrays: fn(arrays, at_once)
    )


def _aligned(site: Site, use: Use, side: Rows, stack: tuple[int, ...] = ()) -> Array:
    """``(rows..., stack..., features)``: rows as in ``use.rows``, features in their own order."""
    x = side.x.transpose(*side.rows, *side.batch, *side.feature_axes)
    lead = len(side.rows) + len(side.batch)
    x = in_own_order(site, use, side, x, lead=lead)
    shape = (*x.shape[: len(side.rows)], *stack, x.shape[-1])
    if len(side.batch) < len(stack):  # experts that read one input
        x = jnp.broadcast_to(jnp.expand_dims(x, len(side.rows)), shape)
    return x


def _split(site: Site, use: Use, x: Array, *, num_rows: int, examples: Atoms | None) -> Array:
    """Rows first to ``(examples, positions, ...)``; without ``examples``, one position each."""
    if examples is None:
        return x.reshape(-1, 1, *x.shape[num_rows:])
    rows = tuple(range(num_rows))
    rest = tuple((d, ()) for d in range(num_rows, x.ndim))
    return by_example(site, Rows(x, rows, (), rest), use.rows, examples, path=use.view.path)


def _convolution(
    site: Site,
    use: Use,
    operands: Sequence[Any],
    cotangent: Array,
    weights: Array | None,
    examples: Atoms | None,
) -> BothSides:
    numbers = site.eqn.params["dimension_numbers"]
    first = (numbers.lhs_spec[0], numbers.out_spec[0], 0)
    kernel, number = operands[1], use.rows[0]

    def apart(x: Array, axis: int) -> Array:
        """The axis of the batch first, split into examples and what else lies in it."""
        x = jnp.moveaxis(x, axis, 0)
        alone = dataclasses.replace(use, rows=(number,))
        return _split(site, alone, x, num_rows=1, examples=examples)

    parts = (operands[0], cotangent, weights)
    arrays = tuple(
        None if x is None else apart(x, axis) for x, axis in zip(parts, first, strict=True)
    )

    def rows(chunk: Any) -> tuple[Array, Array]:
        size = len(chunk[0])
        signal, outputs, there = (
            None if x is None else jnp.moveaxis(x.reshape(-1, *x.shape[2:]), 0, axis)
            for x, axis in zip(chunk, first, strict=True)
        )
        x = _aligned(site, use, input_rows(site, use, [signal, kernel], there))
        g = _aligned(site, use, output_rows(site, use, outputs, there))
        lead = len(use.rows)
        return tuple(y.reshape(size, -1, *y.shape[lead:]) for y in (x, g))

    return BothSides(arrays, examples is not None, rows)
