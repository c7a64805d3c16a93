"""Parameter paths: one string per leaf, the same in every framework."""

from typing import Any

import jax

PyTree = Any


def path_of(key_path: tuple[Any, ...]) -> str:
    """Join a JAX key path with ``/``; wrappers such as NNX's ``value`` do not show."""
    path = jax.tree_util.keystr(key_path, simple=True, separator="/")
    for wrapper in ("/value", "/raw_value"):
        path = path.removesuffix(wrapper)
    return path


def leaves_by_path(tree: PyTree) -> dict[str, Any]:
    """``{path: leaf}`` in flattening order."""
    return {path_of(p): leaf for p, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def with_leaves(tree: PyTree, leaves: dict[str, Any]) -> PyTree:
    """``tree`` with the leaves at the given paths replaced."""
    return jax.tree_util.tree_map_with_path(lambda p, x: leaves.get(path_of(p), x), tree)
