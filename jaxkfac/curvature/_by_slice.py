"""A layer solved one iteration of its scan at a time: eigenvectors that the device cannot hold."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

from jaxkfac.curvature._layer_power import Form, Operands, Power, solve
from jaxkfac.curvature._sharding import put_result, result_sharding

_Solved = tuple[Array | None, Array | None]


def solve_block(form: Form, block: Operands, power: Power) -> _Solved:
    """:func:`solve`, by the way that the eigenvectors ask for.

    In host memory: one iteration's at a time cross to the device, outside of ``jit``. In fewer
    bits than the arithmetic has: one iteration's at a time are widened.

    Raises:
        TypeError: eigenvectors in host memory, under ``jit``.
    """
    vectors = [x for x in (block.basis.a_vectors, block.basis.g_vectors) if x is not None]
    if any(isinstance(x, np.ndarray) for x in vectors):
        return _from_host(form, block, power)
    stacked = block.basis.a_values.ndim > 1
    if stacked and any(x.dtype != block.basis.a_values.dtype for x in vectors):
        flat = _flattened(block)
        solved = jax.lax.map(lambda one: solve(form, one, power), flat)
        return _restored(solved, block)
    return solve(form, block, power)


def _from_host(form: Form, block: Operands, power: Power) -> _Solved:
    if any(isinstance(x, Tracer) for x in jax.tree.leaves((block, power.damping))):
        raise TypeError(
            "the eigenvectors are in host memory, and cross to the device one layer at a time: "
            "precondition outside of jit, or keep them on the device (bases_in='device')"
        )
    flat = _flattened(block)
    where = result_sharding(block.kernel if block.kernel is not None else block.row)
    out = _zeros(flat.kernel), _zeros(flat.row)
    for i in range(len(flat.basis.a_values)):
        one = jax.tree.map(
            lambda x, i=i: put_result(x[i], where) if isinstance(x, np.ndarray) else x[i], flat
        )
        # Dispatch runs ahead of the device: without a wait it would send every slice at once.
        jax.block_until_ready(out)
        rest = (power.exponent, power.mode, power.cut)
        out = _solved_into(out, one, i, power.damping, form=form, rest=rest)
    return _restored(out, block)


@functools.partial(jax.jit, static_argnames=("form", "rest"), donate_argnames="out")
def _solved_into(
    out: _Solved, one: Operands, index: Any, damping: Any, *, form: Form, rest: tuple[Any, ...]
) -> _Solved:
    exponent, mode, cut = rest
    solved = solve(form, one, Power(exponent, damping, mode, cut))
    weight, bias = (
        None if old is None or new is None else old.at[index].set(new)
        for old, new in zip(out, solved, strict=True)
    )
    return weight, bias


def _zeros(like: Array | None) -> Array | None:
    return None if like is None else jnp.zeros_like(like)


def _flattened(block: Operands) -> Operands:
    """The axes of the stack as one, of length 1 where there is none."""
    axes = block.basis.a_values.ndim - 1
    return jax.tree.map(lambda x: x.reshape(math.prod(x.shape[:axes]), *x.shape[axes:]), block)


def _restored(solved: _Solved, block: Operands) -> _Solved:
    stack = block.basis.a_values.shape[:-1]
    weight, bias = (None if x is None else x.reshape(*stack, *x.shape[1:]) for x in solved)
    return weight, bias
