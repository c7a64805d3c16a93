"""Parameter paths: one string per leaf, the same in every framework."""

from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any

WRAPPERS = ("value", "raw_value")  # attributes by which NNX wraps an array in a variable


def path_of(key_path: tuple[Any, ...]) -> str:
    """Join a JAX key path with ``/``; NNX's wrapper around an array does not show."""
    match key_path:
        case (_, *_, jax.tree_util.GetAttrKey(name=name)) if name in WRAPPERS:
            key_path = key_path[:-1]
    return jax.tree_util.keystr(key_path, simple=True, separator="/")


def leaves_by_path(tree: PyTree) -> dict[str, Any]:
    """``{path: leaf}`` in flattening order.

    Raises:
        ValueError: two leaves have the same path.
    """
    leaves: dict[str, Any] = {}
    for key_path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        path = path_of(key_path)
        if path in leaves:
            raise ValueError(f"two parameters have the path {path!r}; rename one of them")
        leaves[path] = leaf
    return leaves


def with_leaves(tree: PyTree, leaves: dict[str, Any]) -> PyTree:
    """``tree`` with the leaves at the given paths replaced."""
    return jax.tree_util.tree_map_with_path(lambda p, x: leaves.get(path_of(p), x), tree)


def is_differentiable(leaf: Any) -> bool:
    """Whether a gradient leaf is a gradient: not an integer, a key or float0."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact)
