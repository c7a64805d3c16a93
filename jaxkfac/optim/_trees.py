"""Trees of gradients: finiteness, choice, and what factors cover."""

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Bool

from jaxkfac._checks import instance_of, named, scalar
from jaxkfac._errors import nearest
from jaxkfac.interception import check_arrays, is_differentiable, leaves_by_path, path_of
from jaxkfac.linalg import is_all_finite

PyTree = Any


def all_finite(*trees: PyTree) -> Bool[Array, ""]:
    """Whether every inexact element of the trees is finite."""
    return is_all_finite(*(x for x in jax.tree.leaves(trees) if is_differentiable(x)))


def gradients_only(tree: PyTree) -> PyTree:
    """``tree`` with the leaves that are no gradients (integers, keys, float0) taken out."""
    return jax.tree.map(lambda x: x if is_differentiable(x) else optax.MaskedNode(), tree)


def cast_like(grads: PyTree, updates: PyTree) -> PyTree:
    """``updates`` in the dtypes of ``grads``, without the leaves that are no gradients."""
    return jax.tree.map(
        lambda g, u: u.astype(g.dtype) if is_differentiable(g) else optax.MaskedNode(),
        grads,
        updates,
    )


def with_constants(grads: PyTree, updates: PyTree) -> PyTree:
    """``updates`` with the leaves that are no gradients put back, as they came."""
    return jax.tree.map(lambda g, u: g if isinstance(u, optax.MaskedNode) else u, grads, updates)


def scaled(factor: ArrayLike, leaf: Array) -> Array:
    """``factor * leaf`` in the dtype of ``leaf``."""
    return jnp.asarray(factor, leaf.dtype) * leaf


def sum_dtype(*trees: PyTree) -> Any:
    """float64 if any leaf is, else float32: sums never run in half precision."""
    dtypes = {jnp.dtype(x.dtype) for x in jax.tree.leaves(trees) if is_differentiable(x)}
    return jnp.dtype(jnp.float64 if jnp.dtype(jnp.float64) in dtypes else jnp.float32)


def covered_leaves(tree: PyTree, covered: Collection[str]) -> PyTree:
    """True on the leaves at the covered paths."""
    return jax.tree_util.tree_map_with_path(lambda p, _: path_of(p) in covered, tree)


def check_some_covered(what: str, tree: PyTree, covered: Collection[str], of: str) -> None:
    """Refuse parameters or gradients of another model than the factors or bases.

    ``optax.masked`` hands over some of them, so some are enough.

    Raises:
        TypeError: a leaf is no array.
        ValueError: no layer has its parameter among them.
    """
    check_arrays(what, tree)
    paths = leaves_by_path(tree)
    if covered and not any(path in paths for path in covered):
        first = next(iter(covered))
        raise ValueError(
            f"{what}: none of the layers of {of} is among them; the first is {first!r}, and the "
            f"nearest are {nearest(first, paths)}"
        )


def check_state(what: str, state: Any, kind: type) -> None:
    """Refuse a state that another transformation made."""
    instance_of(f"{what}: the state", state, kind, "as tx.init(params) gives it")


def check_like_momentum(grads: PyTree, momentum: PyTree) -> None:
    """Refuse gradients that are not like the parameters that the state was made for."""
    own = leaves_by_path(grads)
    absent = [path for path in leaves_by_path(momentum) if path not in own]
    if absent:
        raise ValueError(
            f"grads: expected a tree like the parameters of tx.init, got {named(grads)}, which "
            f"lacks {absent[0]!r}; nnx.Optimizer wants grads = jk.as_state(grads, model)"
        )
    check_arrays("grads", grads)


def is_concrete(x: Any) -> bool:
    """Whether ``x`` is an array with values: not traced, not a float0, not a number of Python's."""
    return isinstance(x, jax.Array) and not isinstance(x, Tracer)


def required_factors(what: str, given: dict[str, Any]) -> Any:
    """``factors=`` of an update, taken out of its keyword arguments.

    Raises:
        TypeError: it was left out, which would be plain gradient descent without a word.
    """
    if "factors" not in given:
        raise TypeError(
            f"{what}: update needs factors=, as in value, grads, factors = stats(params, batch, "
            "key) and tx.update(grads, state, params, factors=factors); factors=None says that "
            "none come with this step"
        )
    return given.pop("factors")


def checked_value(value: Any) -> Any:
    """``value=`` of an update.

    Raises:
        TypeError: it is not one number.
    """
    scalar("value", value, "the loss of this batch, a number")
    return value
