"""The steps of one K-FAC update, each on its own."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Int

from jaxkfac.curvature import Eigenbases
from jaxkfac.interception import is_differentiable
from jaxkfac.linalg import Spectrum
from jaxkfac.optim._trees import gradients_only, inner_product, is_out, scaled, with_constants

PyTree = Any


def keep_where_not_finite(new: Eigenbases, old: Eigenbases) -> tuple[Eigenbases, Int[Array, ""]]:
    """``new``, with each factor that failed to decompose taken from ``old``, and their number.

    A solver that does not converge on an accelerator returns NaN and raises nothing.
    """
    failed = []

    def pick(fresh: Any, stale: Any) -> Any:
        if not isinstance(fresh, Spectrum):  # the diagonal of a scale or lone bias
            ok = jnp.isfinite(fresh).all()
            failed.append((~ok).sum(dtype=jnp.int32))
            return jnp.where(ok, fresh, stale)
        ok = jnp.isfinite(fresh.values).all(-1)
        failed.append((~ok).sum(dtype=jnp.int32))
        values = jnp.where(ok[..., None], fresh.values, stale.values)
        if fresh.vectors is None:
            return Spectrum(values, None)
        return Spectrum(values, jnp.where(ok[..., None, None], fresh.vectors, stale.vectors))

    picked = jax.tree.map(pick, new, old, is_leaf=lambda x: isinstance(x, Spectrum))
    return picked, sum(failed, jnp.zeros((), jnp.int32))


def constrain_norm(
    steps: PyTree, grads: PyTree, ours: PyTree, rate: ArrayLike, limit: float
) -> PyTree:
    r"""Scale the steps so that $\eta^2 \langle p, \nabla \rangle \le$ ``limit``.

    Only the leaves that ``ours`` marks count and are scaled.
    """
    product = inner_product(steps, grads, ours)
    squared = jnp.square(jnp.asarray(rate, product.dtype)) * product
    tiny = jnp.finfo(product.dtype).tiny
    factor = jnp.sqrt(limit / jnp.maximum(squared, tiny))

    def scale(factor: Array, kept: PyTree) -> PyTree:
        return jax.tree.map(
            lambda mine, p: scaled(factor, p) if mine and not is_out(p) else p, ours, kept
        )

    # A cond, because XLA would copy the sum over all leaves into the scaling of each.
    kept = gradients_only(steps)
    return with_constants(
        steps, jax.lax.cond(factor < 1, scale, lambda _, kept: kept, factor, kept)
    )


def zero_momentum(params: PyTree, ours: PyTree, *, everywhere: bool) -> PyTree:
    """Zeros like the parameters that ``ours`` marks, or like all that have a gradient."""
    return jax.tree.map(
        lambda mine, x: (
            jnp.zeros_like(x)
            if (mine or everywhere) and is_differentiable(x)
            else optax.MaskedNode()
        ),
        ours,
        params,
    )


def advance_momentum(decay: float, momentum: PyTree, steps: PyTree) -> PyTree:
    r"""$m \leftarrow \mu m + p$ where there is a momentum, in its dtype."""
    return jax.tree.map(
        lambda p, m: m if isinstance(m, optax.MaskedNode) else scaled(decay, m) + p.astype(m.dtype),
        steps,
        momentum,
    )


def descend(
    momentum: PyTree, grads: PyTree, params: PyTree | None, rate: ArrayLike, weight_decay: float
) -> PyTree:
    r"""$-\eta (m + w \theta)$ where there is a momentum, the gradient elsewhere."""

    def one(g: Any, m: Any, x: Any) -> Any:
        if isinstance(m, optax.MaskedNode):
            return g
        if weight_decay:
            m = m + scaled(weight_decay, x.astype(m.dtype))
        return -scaled(rate, m).astype(g.dtype)

    return jax.tree.map(one, grads, momentum, grads if params is None else params)
