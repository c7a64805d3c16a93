r"""Squared gradients in an eigenbasis, summed over examples: arrays only.

With $\tilde a = Q_A^\top a$ and $\tilde g = Q_G^\top g$, an example whose rows are
$a_s, g_s$ has the gradient $\Gamma = \sum_s \tilde a_s \tilde g_s^\top$ in the eigenbasis. The
result is $\sum_n \Gamma_n^{\odot 2}$. Input rows are ``(examples, positions, stack..., in)`` and
output rows ``(examples, positions, stack..., out)``; rows that do not exist are zero.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxkfac.interception.values import Statistic, entry, statistic
from jaxkfac.kinds._rows import ArrayOrShape
from jaxkfac.linalg import statistics_dtype

_AxisPair = tuple[tuple[int, ...], tuple[int, ...]]  # axes of the left and the right operand
_EXACT = jax.lax.Precision.HIGHEST  # never TF32: these values divide the gradient

# A sum over pairs of S positions takes (S + 1) / 2 times the multiplications of gradients that are
# formed one by one, but writes no gradient. On two CPU cores with sides of 256 (512), milliseconds
# for 2048 rows, pairs against gradients: S = 2: 7 against 34 (55 against 209), S = 4: 18 against
# 21 (87 against 112), S = 8: 55 against 27 (233 against 119).
PAIRS_UP_TO = 4


@statistic
class Basis(Statistic):
    """The eigenbasis of one use.

    Attributes:
        a: Eigenvectors of the input side, ``(stack..., in[+1], in[+1])``; ``None`` for identity.
        g: Eigenvectors of the output side, ``(stack..., out, out)``; ``None`` for identity.
        ones: Whether the input side ends in a ones feature, which the rows lack.
        constant: The factor by which the program multiplies the weight before it reads it, if any.
            The gradient of the weight, but not of the bias, is the rows' product times this factor.
        unit: Divisor of gradients before they are squared, ``(stack..., 1, 1)``; ``None`` for 1.
    """

    a: Any = entry(0, default=None)
    g: Any = entry(0, default=None)
    ones: bool = dataclasses.field(default=False, metadata={"static": True})
    # In a slot, ones that become the constant factor itself. It belongs to the kernel's rows and
    # not to the row of a joint bias, so it must be in them before a rotation mixes the two.
    constant: Any = entry(1, default=None)
    unit: Any = entry(0, default=None)


def rotate(x: ArrayOrShape, vectors: ArrayOrShape | None, lead: int) -> ArrayOrShape:
    """Rows ``(lead..., stack..., n)`` times eigenvectors: ``(stack..., lead..., n)``, wide."""
    x, last = x.astype(statistics_dtype(x.dtype)), x.ndim - 1
    if vectors is None:
        return x.transpose(*range(lead, last), *range(lead), last)
    batch = (tuple(range(lead, last)), tuple(range(last - lead)))
    return _dot(x, vectors, ((last,), (last - lead,)), batch)


def rotate_inputs(x: ArrayOrShape, basis: Basis, lead: int) -> ArrayOrShape:
    """Input rows in the eigenbasis, including the ones feature."""
    x = scaled(x, basis)
    if not basis.ones:
        return rotate(x, basis.a, lead)
    if basis.a is None:
        return rotate(with_ones(x), None, lead)
    # The ones feature adds its row of the eigenvectors, so no row of x is copied to be extended.
    ones = basis.a[..., -1, :]
    ones = ones.reshape(*ones.shape[:-1], *[1] * lead, ones.shape[-1])
    return rotate(x, basis.a[..., :-1, :], lead) + ones


def rotate_outputs(g: ArrayOrShape, basis: Basis, lead: int) -> ArrayOrShape:
    """Output rows in the eigenbasis, in the unit of the squares."""
    return in_unit(rotate(g, basis.g, lead), basis.unit)


def in_unit(x: ArrayOrShape, unit: ArrayOrShape | None) -> ArrayOrShape:
    """``(stack..., rows..., n)`` divided by the unit; dividing the result copies no basis."""
    if unit is None:
        return x
    stack = unit.shape[:-2]
    return x / unit.astype(x.dtype).reshape(*stack, *[1] * (x.ndim - len(stack)))


def scaled(x: ArrayOrShape, basis: Basis) -> ArrayOrShape:
    """``x`` times the constant of the weight."""
    if basis.constant is None:
        return x
    constant = basis.constant.reshape(-1)[0]  # equal for all entries of the stack
    return x.astype(constant.dtype) * constant


def with_ones(x: ArrayOrShape) -> ArrayOrShape:
    """``x`` with ones appended to the last axis."""
    return jnp.concatenate([x, jnp.ones((*x.shape[:-1], 1), x.dtype)], -1)


def squares_by_row(x: ArrayOrShape, g: ArrayOrShape, basis: Basis, lead: int) -> ArrayOrShape:
    r"""$\sum_r (\tilde a_r \tilde g_r^\top)^{\odot 2}$ over single rows, ``(stack..., in, out)``.

    One product of squares: no row's gradient is formed.

    Args:
        x: Input rows, ``(lead..., stack..., in)``.
        g: Output rows.
        basis: The eigenbasis.
        lead: Number of row axes.
    """
    x, g = rotate_inputs(x, basis, lead), rotate_outputs(g, basis, lead)
    x, g = jnp.square(x), jnp.square(g)
    return _over_rows(x, g, lead)


def squares_by_example(x: ArrayOrShape, g: ArrayOrShape, basis: Basis) -> ArrayOrShape:
    r"""$\sum_n (\sum_s \tilde a_{ns} \tilde g_{ns}^\top)^{\odot 2}$, ``(stack..., in, out)``.

    With few positions, the sum runs over pairs of them:
    $\sum_n \sum_{s,t} (\tilde a_s \odot \tilde a_t)(\tilde g_s \odot \tilde g_t)^\top$, in one
    product for each distance $t - s$. Otherwise each example's gradient is formed and squared.
    """
    if not over_pairs(x.shape[1]):
        return jnp.square(in_unit(gradients(x, g, basis), basis.unit)).sum(-3)
    stack = x.ndim - 3
    x, g = rotate_inputs(x, basis, 2), rotate_outputs(g, basis, 2)
    total = _over_rows(jnp.square(x), jnp.square(g), 2)
    positions = x.shape[stack + 1]
    for distance in range(1, positions):
        x_pairs, g_pairs = (
            jax.lax.slice_in_dim(y, 0, positions - distance, axis=stack + 1)
            * jax.lax.slice_in_dim(y, distance, positions, axis=stack + 1)
            for y in (x, g)
        )
        # A pair of positions and its mirror image have the same product: hence the 2.
        total = total + 2 * _over_rows(x_pairs, g_pairs, 2)
    return total


def weighed_squares(
    x: ArrayOrShape, g: ArrayOrShape, basis: Basis, scale: ArrayOrShape
) -> ArrayOrShape:
    r"""$\sum_{ij} s_{ij} \Gamma_{n,ij}^2$ for each example, ``(stack..., examples)``.

    With one position this is $\sum_j (\sum_i s_{ij} \tilde a_i^2) \tilde g_j^2$.

    Args:
        x: Input rows, ``(examples, positions, stack..., in)``.
        g: Output rows.
        basis: The eigenbasis.
        scale: $s$, ``(stack..., in[+1], out)``.
    """
    if x.shape[1] > 1:
        squares = jnp.square(in_unit(gradients(x, g, basis), basis.unit))
        return (squares * scale[..., None, :, :].astype(squares.dtype)).sum((-2, -1))
    x, g = rotate_inputs(x, basis, 2)[..., 0, :], rotate_outputs(g, basis, 2)[..., 0, :]
    weights = jnp.matmul(jnp.square(x), scale.astype(x.dtype), precision=_EXACT)
    return (weights * jnp.square(g)).sum(-1)


def over_pairs(positions: int) -> bool:
    """Whether squares are summed over pairs of positions, without a gradient per example."""
    return positions <= PAIRS_UP_TO


def gradients(x: ArrayOrShape, g: ArrayOrShape, basis: Basis) -> ArrayOrShape:
    """Each example's gradient in the eigenbasis, ``(stack..., examples, in, out)``.

    Either the rows are rotated or the gradients, whichever is less work.
    """
    n_in, n_out, last = x.shape[-1] + basis.ones, g.shape[-1], x.ndim - 1
    a_dense, g_dense = basis.a is not None, basis.g is not None
    of_rows = x.shape[1] * (a_dense * n_in**2 + g_dense * n_out**2)
    of_gradients = n_in * n_out * (a_dense * n_in + g_dense * n_out)
    if of_rows <= of_gradients:
        x, g = rotate_inputs(x, basis, 2), rotate(g, basis.g, 2)
        batch, rows = tuple(range(last - 1)), (last - 1,)
        return _dot(x, g, (rows, rows), (batch, batch))
    batch = (*range(2, last), 0)
    gradient = scaled(_dot(x, g, ((1,), (1,)), (batch, batch)), basis)
    if basis.ones:
        bias = g.sum(1, dtype=gradient.dtype).transpose(*range(1, last - 1), 0, last - 1)
        gradient = jnp.concatenate([gradient, bias[..., None, :]], -2)
    return rotate_gradients(gradient, basis.a, basis.g)


def rotate_gradients(
    gradient: ArrayOrShape, a: ArrayOrShape | None, g: ArrayOrShape | None
) -> ArrayOrShape:
    r"""$Q_A^\top \Gamma Q_G$ of ``(stack..., examples, in, out)``."""
    stack = tuple(range(gradient.ndim - 3))
    last = gradient.ndim - 1
    for vectors in (a, g):  # each product contracts the first side, appends the new
        if vectors is None:
            gradient = gradient.swapaxes(-1, -2)
        else:
            gradient = _dot(gradient, vectors, ((last - 1,), (len(stack),)), (stack, stack))
    return gradient


def squares_by_token(tokens: ArrayOrShape, g: ArrayOrShape, size: int) -> ArrayOrShape:
    r"""Squares of an embedding's gradient, ``(size, out)``; its input side is a diagonal.

    Within an example, the rows of each token are summed before they are squared. There are at most
    as many such sums as rows, while one full gradient per example would have ``size`` times as many
    rows as there are examples.

    Args:
        tokens: Integers, ``(examples, positions)``; tokens out of range are ignored.
        g: Output rows in the eigenbasis, ``(examples, positions, out)``.
        size: Number of rows of the table.
    """
    flat = g.reshape(-1, g.shape[-1])
    if tokens.shape[1] > 1:
        order = jnp.argsort(tokens, axis=1)
        tokens = jnp.take_along_axis(tokens, order, axis=1)
        flat = jnp.take_along_axis(g, order[..., None], axis=1).reshape(flat.shape)
        first = jnp.ones_like(tokens[:, :1], bool)
        starts = jnp.concatenate([first, tokens[:, 1:] != tokens[:, :-1]], axis=1)
        segments = jnp.cumsum(starts.reshape(-1)) - 1
        flat = jnp.zeros_like(flat).at[segments].add(flat, indices_are_sorted=True)
        # After the last segment there are zeros, which may be added to any token.
        sorted_tokens = tokens.reshape(-1)
        tokens = jnp.zeros_like(sorted_tokens).at[segments].set(sorted_tokens)
    zeros = jnp.zeros((size, g.shape[-1]), g.dtype)
    return zeros.at[tokens.reshape(-1)].add(jnp.square(flat), mode="drop")


def _over_rows(x: ArrayOrShape, g: ArrayOrShape, lead: int) -> ArrayOrShape:
    """``sum_r x_r g_r^T`` over row axes that follow the stack: ``(stack..., in, out)``."""
    stack = tuple(range(x.ndim - 1 - lead))
    rows = tuple(range(len(stack), x.ndim - 1))
    return _dot(x, g, (rows, rows), (stack, stack))


def _dot(x: ArrayOrShape, y: ArrayOrShape, contract: _AxisPair, batch: _AxisPair) -> ArrayOrShape:
    dtype = statistics_dtype(x.dtype, y.dtype)
    return jax.lax.dot_general(
        x.astype(dtype), y.astype(dtype), (contract, batch), precision=_EXACT
    )
