"""The steps of one K-FAC update, each on its own."""

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from jaxkfac.interception import is_differentiable, leaves_by_path
from jaxkfac.linalg import inner_product
from jaxkfac.optim._injected import may_be_positive
from jaxkfac.optim._trees import covered_leaves, scaled, sum_dtype

PyTree = Any


def norm_scale(
    steps: PyTree, grads: PyTree, covered: Collection[str], rate: ArrayLike, limit: ArrayLike
) -> Float[Array, ""]:
    r"""The factor at most 1 by which $\eta^2 \langle p, \nabla \rangle$ is at most ``limit``.

    Only the leaves at the covered paths count.
    """
    taken, given = leaves_by_path(steps), leaves_by_path(grads)
    ours = [path for path in given if path in covered]
    dtype = sum_dtype(steps, grads)
    product = inner_product([taken[path] for path in ours], [given[path] for path in ours], dtype)
    squared = jnp.square(jnp.asarray(rate, dtype)) * product
    limit = jnp.asarray(limit, dtype)
    beyond = squared > limit  # of NaN it is not
    return jnp.where(beyond, jnp.sqrt(limit / jnp.where(beyond, squared, 1)), 1)


def scale_covered(factor: Array, steps: PyTree, covered: Collection[str]) -> PyTree:
    """The steps, scaled at the covered paths."""
    ours = covered_leaves(steps, covered)
    return jax.tree.map(lambda mine, p: scaled(factor, p) if mine else p, ours, steps)


def zero_momentum(params: PyTree, covered: Collection[str], *, everywhere: bool) -> PyTree:
    """Zeros like the parameters at the covered paths, or like all that have a gradient."""
    return jax.tree.map(
        lambda mine, x: (
            jnp.zeros_like(x)
            if (mine or everywhere) and is_differentiable(x)
            else optax.MaskedNode()
        ),
        covered_leaves(params, covered),
        params,
    )


def advance_momentum(decay: ArrayLike, momentum: PyTree, steps: PyTree) -> PyTree:
    r"""$m \leftarrow \mu m + p$ where there is a momentum, in its dtype."""
    return jax.tree.map(
        lambda p, m: m if isinstance(m, optax.MaskedNode) else scaled(decay, m) + p.astype(m.dtype),
        steps,
        momentum,
    )


def descend(
    momentum: PyTree, grads: PyTree, params: PyTree | None, rate: ArrayLike, weight_decay: ArrayLike
) -> PyTree:
    r"""$-\eta (m + w \theta)$ where there is a momentum, the gradient elsewhere.

    ``params`` may have more leaves than ``grads``: those without a gradient.
    """

    def decayed(x: Array, m: Any) -> Any:
        if isinstance(m, optax.MaskedNode):
            return m
        return m + scaled(weight_decay, x.astype(m.dtype))

    def step(g: Array, m: Any) -> Array:
        return g if isinstance(m, optax.MaskedNode) else -scaled(rate, m).astype(g.dtype)

    if may_be_positive(weight_decay):
        momentum = jax.tree.map(decayed, params, momentum)
    return jax.tree.map(step, grads, momentum)


def taken_where(
    finite: Bool[Array, ""],
    burning: Bool[Array, ""] | None,
    step: Callable[[], Any],
    skip: Callable[[], Any],
    average_alone: Callable[[], Any],
) -> Any:
    """``step()`` where what came is finite, else ``skip()``; ``average_alone()`` in a burn-in.

    By a cond, not a select of every leaf: XLA copies the reduction over all leaves into each
    select, and compiles them for minutes (48 layers: 35 s of CPU against 10).
    """
    if burning is None:
        return jax.lax.cond(finite, step, skip)
    branch = jnp.where(finite, jnp.where(burning, 2, 1), 0)
    return jax.lax.switch(branch, [skip, step, average_alone])


def where(done: Bool[Array, ""], new: PyTree, old: PyTree) -> PyTree:
    """``new`` if ``done``, else ``old``, leaf by leaf."""
    return jax.tree.map(lambda x, y: jnp.where(done, x, y), new, old)
