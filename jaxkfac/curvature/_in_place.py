"""Refresh bases or inverses in place, one matrix after the other.

Decompositions of a whole stack would need the stack unfolded, its results beside the stored ones,
and a workspace for each matrix. Here only the matrices of one call exist in full, and every result
is written over the stored one, or left out where it is not finite.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Int

from jaxkfac._arguments import ArrayTree
from jaxkfac.blocks import Factors, Place, Side, Sides, layout_of
from jaxkfac.curvature._eigenbases import Eigenbases
from jaxkfac.curvature._eigendecompose import block_sums, over
from jaxkfac.curvature._inverses import Inverses, inversion
from jaxkfac.curvature._placement import solver_scratch
from jaxkfac.linalg.spectral import (
    Damping,
    DampingMode,
    Spectrum,
    damped_inverse,
    eigh_checked,
    in_sequence,
    iterate_eigenvectors,
)

Failed = Int[Array, ""]


def refresh_bases(
    bases: Eigenbases, factors: Factors, *, iterate: ArrayLike | None = None
) -> tuple[Eigenbases, Failed]:
    """Eigenbases of new factors, written over older ones; inside a compiled program.

    Args:
        bases: Eigenbases with vectors, for the layers of ``factors`` or more.
        factors: Sums and counts; their means are decomposed.
        iterate: Whether to take one step of orthogonal iteration from ``bases`` instead of a
            decomposition, a traced bool. By default never.

    Returns:
        Bases of the layers of ``factors``, and how many of their sides kept their old value because
        the new one was not finite.
    """
    layout = layout_of(factors.layers, factors.bias)
    failed, after = _nothing(), _first(factors)
    limit = _scratch(factors)
    solve, numbers = (_eigh, ()) if iterate is None else (_eigh_or_iterated, (iterate,))
    spectra: dict[Place, Any] = {}
    for place, block in layout.blocks.items():
        old, sums = bases.side(place).data, block_sums(factors, block)
        if sums.is_matrix:
            spectra[place], more = _solved(
                solve, sums.data, sums.count, old, (), numbers, after, at_once=_at_once(sums, limit)
            )
            after = _one_of(spectra[place].values, after)
        else:
            new = over(sums.data, sums.count)
            is_spectrum = isinstance(old, Spectrum)
            new, more = _kept_where_not_finite(new, old.values if is_spectrum else old, is_spectrum)
            spectra[place] = Spectrum(new, None) if is_spectrum else new
        failed += more
    clipping = {"max_condition": bases.max_condition, "floor": bases.floor}
    return Eigenbases.of_blocks(layout, spectra, **clipping, origin=bases.origin), failed


def refresh_inverses(
    inverses: Inverses,
    factors: Factors,
    *,
    damping: Damping,
    damping_mode: DampingMode,
) -> tuple[Inverses, Failed]:
    """Inverses of new damped factors, written over older ones; inside a compiled program.

    Args:
        inverses: Inverses of the layers of ``factors`` or more. The new ones are packed where
            these are.
        factors: Sums and counts; their means are inverted.
        damping: As for ``invert``.
        damping_mode: As for ``invert``.

    Returns:
        Inverses of the layers of ``factors``, and how many kept their old value.
    """
    clipping = {"max_condition": inverses.max_condition, "floor": inverses.floor}
    new, problems = inversion(factors, damping=damping, damping_mode=damping_mode, **clipping)
    failed, after = _nothing(), _first(factors)
    limit = _scratch(factors)
    sides: Sides = {}
    for place, x in new.sides.items():
        kept, more = _kept_where_not_finite(x.data, inverses.side(place).data, False)
        sides[place], failed = Side(kept), failed + more
    for place, (sums, shift) in problems.items():
        old, at_once = inverses.side(place).data, _at_once(sums, limit)
        solved, more = _solved(
            _inverse, sums.data, sums.count, old, (shift,), (), after, at_once=at_once
        )
        sides[place], after, failed = Side(solved), _one_of(solved, after), failed + more
    return new.with_sides(sides), failed


def _nothing() -> Failed:
    return jnp.zeros((), jnp.int32)


def _first(factors: Factors) -> Array:
    """A number to begin a sequence with; see ``in_sequence``."""
    return jnp.zeros((), factors.terms.dtype)


def _one_of(solved: Array, otherwise: Array) -> Array:
    """A number of a solved stack, for the next to wait for; an empty stack has none."""
    return solved.reshape(-1)[0] if solved.size else otherwise


def _scratch(factors: Factors) -> int:
    """Bytes of scratch of the largest matrix, which no refresh can do without."""
    matrices = [side for side in factors.sides.values() if side.is_matrix]
    return max(map(_scratch_of, matrices), default=0)


def _scratch_of(matrix: Side) -> int:
    return solver_scratch(matrix.size, 1, matrix.data.dtype.itemsize)


def _at_once(sums: Side, limit: int) -> int:
    """How many matrices of a stack are solved in one call; it divides their number."""
    count, fitting = math.prod(sums.data.shape[:-2]), limit // _scratch_of(sums)
    return next(k for k in range(min(max(fitting, 1), max(count, 1)), 0, -1) if count % k == 0)


def _kept_where_not_finite(new: Array, old: Array, by_row: bool) -> tuple[Array, Failed]:
    """``new``, or ``old`` in its place; each row of a side's diagonal, or all of a parameter's."""
    ok = jnp.isfinite(new).all(-1) if by_row else jnp.isfinite(new).all()
    kept = jnp.where(ok[..., None] if by_row else ok, new, old)
    return kept, (~ok).sum(dtype=jnp.int32)


Solve = Callable[..., tuple[ArrayTree, Array]]


@functools.partial(jax.jit, static_argnames=("solve", "at_once"))
def _solved(
    solve: Solve,
    sums: Array,
    divisor: Array,
    old: ArrayTree,
    by_matrix: tuple[Array, ...],
    numbers: tuple[Any, ...],
    after: Array,
    *,
    at_once: int,
) -> tuple[ArrayTree, Failed]:
    """``solve`` for each matrix of a stack, written over ``old`` where the result is finite.

    Args:
        solve: ``solve(matrix, old, *by_matrix, *numbers)`` of one matrix, to ``(new, is_finite)``.
        sums: ``(stack..., n, n)``, or folded.
        divisor: What makes means of the sums, ``(stack...)`` or a scalar.
        old: Results of before, with the axes of the stack.
        by_matrix: Arrays with one entry for each matrix.
        numbers: Arguments that are the same for all.
        after: A number that is known before the first matrix is read.
        at_once: How many matrices an accelerator solves in one call.
    """
    stack = sums.shape[:-2]
    if not sums.size:
        return old, _nothing()
    flat = lambda x: x.reshape(-1, *x.shape[len(stack) :])
    per_matrix = (jnp.broadcast_to(divisor, stack), *by_matrix)
    sums, per_matrix, old = jax.tree.map(flat, (sums, per_matrix, old))
    matrix_shape, likes = sums.shape[1:], jax.eval_shape(lambda: old)
    # Solvers want the numbers of a column side by side. XLA would keep all of these arrays in that
    # order, and copy them back and forth at every step, due or not. A matrix that is flattened into
    # a row has only one order, and the barriers keep XLA from removing the reshapes.
    in_rows = lambda x: x.reshape(len(x), -1)
    sums, old = jax.lax.optimization_barrier(jax.tree.map(in_rows, (sums, old)))
    operands = (sums, *per_matrix)

    def one(operands: tuple[Array, ...], rows: ArrayTree) -> tuple[ArrayTree, Array]:
        sums, divisor, *more = operands
        mean = (sums / divisor).reshape(matrix_shape)
        matrix = Side(in_sequence(mean, after), is_matrix=True).in_full().data
        old = jax.tree.map(lambda x, like: x.reshape(like.shape[1:]), rows, likes)
        new, ok = solve(matrix, old, *more, *numbers)
        return jax.tree.map(lambda x, row: jnp.where(ok, x.reshape(-1), row), new, rows), ~ok

    def in_groups(size: int) -> Callable[..., tuple[ArrayTree, Array]]:
        def run(operands: tuple[Array, ...], old: ArrayTree) -> tuple[ArrayTree, Array]:
            def group(i: ArrayLike, carry: tuple[ArrayTree, Array]) -> tuple[ArrayTree, Array]:
                old, failed = carry
                read = lambda x: jax.lax.dynamic_slice_in_dim(x, i * size, size)
                if size > 1:
                    new, bad = jax.vmap(one)(*jax.tree.map(read, (operands, old)))
                else:  # not as a batch of one, for which there may be another solver
                    single = jax.tree.map(lambda x: read(x)[0], (operands, old))
                    new, bad = jax.tree.map(lambda x: x[None], one(*single))
                write = lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, i * size, 0)
                return jax.tree.map(write, old, new), failed + bad.sum(dtype=jnp.int32)

            count = len(operands[0])
            if count == size:
                return group(0, (old, _nothing()))
            return jax.lax.fori_loop(0, count // size, group, (old, _nothing()))

        return run

    new, failed = jax.lax.platform_dependent(
        operands, old, cpu=in_groups(1), default=in_groups(at_once)
    )
    new = jax.lax.optimization_barrier(new)
    return jax.tree.map(lambda x, like: x.reshape(*stack, *like.shape[1:]), new, likes), failed


def _eigh(matrix: Array, old: Spectrum) -> tuple[Spectrum, Array]:
    new = eigh_checked(matrix, vectors=old.vectors is not None)
    return new, jnp.isfinite(new.values).all()


def _iterated(matrix: Array, old: Spectrum) -> tuple[Spectrum, Array]:
    assert old.vectors is not None
    new = iterate_eigenvectors(matrix, old.vectors)
    return new, jnp.isfinite(new.values).all()


def _eigh_or_iterated(matrix: Array, old: Spectrum, iterate: Array) -> tuple[Spectrum, Array]:
    return jax.lax.cond(iterate, _iterated, _eigh, matrix, old)


def _inverse(matrix: Array, old: Array, shift: Array) -> tuple[Array, Array]:
    new, stored = damped_inverse(matrix, shift), Side(old, is_matrix=True)
    # If an inverse failed, all its entries are NaN, so one entry is enough to check.
    return stored.with_data(new).stored_like(stored).data, jnp.isfinite(new[0, 0])
