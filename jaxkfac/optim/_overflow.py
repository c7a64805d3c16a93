"""Averages that overflow: factors too large to be averaged, and averages that begin anew."""

import dataclasses
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxkfac.factors import Factors


def is_in_range(factors: Factors | None) -> Bool[Array, ""]:
    """Whether no sum is above the square root of the largest number, 1.8e19 in float32.

    The product of two such sums is finite, as preconditioning takes it, and so is an average of
    1e19 of them. No entry of a second moment is above the largest one of its diagonal, so that
    diagonals alone are read. NaN is not in range.
    """
    flags = []
    for x in () if factors is None else _diagonals(jax.lax.stop_gradient(factors)):
        # float16, in which nobody sums, would have a bound of 256.
        dtype = jnp.float32 if x.dtype.itemsize < 4 else x.dtype
        bound = math.sqrt(float(jnp.finfo(dtype).max))
        flags.append((x.astype(dtype) <= bound).all())
    return jnp.stack(flags).all() if flags else jnp.asarray(True)


def begun_anew(average: Factors, new: Factors) -> tuple[Factors, Int[Array, ""]]:
    """An average with a step's factors in place of what is not finite of it, and how many were not.

    Infinity stays infinity whatever is added, and its layer would never be decomposed again. A
    matrix of A begins with the sums and counts of ``new``. G shares its count with other layers, so
    that it begins with the mean of ``new`` times this count. Where ``new`` has no rows or
    terms, the average stays until some come.
    """
    dense_a = {layer.input for layer in average.layers if layer.a_dense}
    dense_g = {layer.name for layer in average.layers if layer.g_dense}
    restarted, seen = [jnp.zeros((), jnp.int32)], new.terms > 0
    weight = average.terms / jnp.where(seen, new.terms.astype(average.terms.dtype), 1)

    def lost(x: Array, *, dense: bool, comes: Array) -> Array:
        x = jax.lax.stop_gradient(_diagonal(x) if dense else x)
        bad = ~jnp.isfinite(x).all(-1) & comes
        restarted.append(bad.sum(dtype=jnp.int32))
        return bad

    a_sums, a_counts, g_sums, diagonals = {}, {}, {}, {}
    for name, x in average.a_sums.items():
        bad = lost(x, dense=name in dense_a, comes=new.a_counts[name] > 0)
        over = bad.reshape(bad.shape + (1,) * (x.ndim - bad.ndim))
        a_sums[name] = jnp.where(over, new.a_sums[name].astype(x.dtype), x)
        count = average.a_counts[name]
        a_counts[name] = jnp.where(bad, new.a_counts[name].astype(count.dtype), count)
    for name, x in average.g_sums.items():
        bad = lost(x, dense=name in dense_g, comes=seen)
        over = bad.reshape(bad.shape + (1,) * (x.ndim - bad.ndim))
        fresh = new.g_sums[name].astype(x.dtype) * weight.astype(x.dtype)
        g_sums[name] = jnp.where(over, fresh, x)
    for name, x in average.diagonals.items():
        bad = ~jnp.isfinite(jax.lax.stop_gradient(x)) & seen
        restarted.append(bad.any().astype(jnp.int32))
        fresh = new.diagonals[name].astype(x.dtype) * weight.astype(x.dtype)
        diagonals[name] = jnp.where(bad, fresh, x)
    begun = dataclasses.replace(
        average, a_sums=a_sums, a_counts=a_counts, g_sums=g_sums, diagonals=diagonals
    )
    return begun, sum(restarted[1:], restarted[0])


def _diagonals(factors: Factors) -> Iterator[Array]:
    """Diagonals of dense factors, and everything else whole."""
    dense_a = {layer.input for layer in factors.layers if layer.a_dense}
    dense_g = {layer.name for layer in factors.layers if layer.g_dense}
    for name, x in factors.a_sums.items():
        yield _diagonal(x) if name in dense_a else x
    for name, x in factors.g_sums.items():
        yield _diagonal(x) if name in dense_g else x
    yield from factors.diagonals.values()
    if factors.corrections is not None:
        yield from factors.corrections.sums.values()
        yield from factors.corrections.bias_sums.values()


def _diagonal(matrix: Array) -> Array:
    return jnp.diagonal(matrix, axis1=-2, axis2=-1)
