"""Checks of arguments that every package takes, and the paths of their leaves."""

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from jaxkfac._errors import named

# ---------------- trees of arrays


def is_array(leaf: object) -> bool:
    """Whether a leaf is an array, the shape and dtype of one, or a number."""
    array = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    return array or isinstance(leaf, bool | int | float | complex)


if TYPE_CHECKING:  # no static type includes all nodes that frameworks register with JAX
    ArrayTree = Any
else:

    class _LeavesAreArrays(type):
        def __instancecheck__(cls, tree):
            return all(map(is_array, jax.tree.leaves(tree)))

    class ArrayTree(metaclass=_LeavesAreArrays):
        """A tree of arrays, of their shapes and dtypes, or of numbers; for annotations.

        The tests check annotations at run time: a model, a function or a text among the leaves is
        a type error there. ``jaxtyping.PyTree[ArrayLike]`` would say the same, and takes 3 ms for
        20 leaves; this takes 25 us.
        """


# ---------------- checks of apply functions and trees of arrays


def check_function(what: str, fn: object, form: str = "apply_fn(params, inputs)") -> None:
    """Refuse an argument that is no function of parameters, such as a model.

    Raises:
        TypeError: the message names the argument and how a model becomes a function.
    """
    if remedies := _as_function(fn):
        of_function, _ = remedies
        raise TypeError(
            f"{what}: expected a function {form}, got the model {named(fn)}; write {of_function}"
        )
    if not callable(fn):
        raise TypeError(f"{what}: expected a function {form}, got {named(fn)}")


_MODELS = {  # by module and class: how a model becomes a function, and where its parameters are
    ("flax.nnx", "Module"): ("apply_fn, params = jk.from_nnx(model)",) * 2,
    ("flax.linen", "Module"): (
        "model.apply, with the parameters that model.init returned",
        "params = model.init(key, inputs)",
    ),
}


def _as_function(x: object) -> tuple[str, str] | None:
    """What to write in the place of a model of another library; ``None`` for anything else.

    The library is not imported for this: without it there is no model of it.
    """
    for (module, name), remedies in _MODELS.items():
        if module in sys.modules and isinstance(x, getattr(sys.modules[module], name)):
            return remedies
    return None


def check_arrays(what: str, tree: PyTree) -> None:
    """Refuse a tree with leaves other than arrays, their shapes, and numbers.

    Raises:
        TypeError: the message names the first such leaf.
    """
    if remedies := _as_function(tree):
        _, of_params = remedies
        raise TypeError(
            f"{what}: expected a tree of arrays, got the model {named(tree)}; write {of_params}"
        )
    for leaf in jax.tree.leaves(tree):
        if not is_array(leaf):
            remedy = ""
            if callable(leaf):  # an activation is a leaf of Equinox's models
                remedy = "; of an Equinox model, eqx.partition(model, eqx.is_inexact_array)[0]"
            raise TypeError(f"{what}: expected a tree of arrays, got {named(leaf)} in it{remedy}")


def check_params(paths: Iterable[str]) -> None:
    """Refuse parameters that include Linen's batch statistics: an optimizer would step them.

    Raises:
        ValueError: the message names the first one.
    """
    wrong = [path for path in paths if "batch_stats" in path.split("/")]
    if wrong:
        raise ValueError(
            f"params: {wrong[0]!r} is a batch statistic, not a parameter; pass "
            "variables['params'], and the rest as state= of an apply_fn(params, inputs, state) "
            "that returns model.apply({'params': params, **state}, inputs, mutable=list(state))"
        )


# ---------------- parameter paths: one string for each leaf, the same in every framework


WRAPPERS = ("value", "raw_value")  # attributes by which NNX wraps an array in a variable


def path_of(key_path: tuple[Any, ...]) -> str:
    """Join a JAX key path with ``/``, leaving out NNX's wrapper around an array."""
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


def is_differentiable(leaf: object) -> bool:
    """Whether a leaf can have a gradient: it is no integer, key or float0."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def partition(tree: ArrayTree) -> tuple[dict[str, Any], dict[str, Any]]:
    """The leaves that have a gradient, and the remaining ones, each as ``{path: leaf}``.

    ``with_leaves`` puts new leaves back into the tree.
    """
    leaves = leaves_by_path(tree)
    free = {path: leaf for path, leaf in leaves.items() if is_differentiable(leaf)}
    return free, {path: leaf for path, leaf in leaves.items() if path not in free}


def with_leaves(tree: PyTree, leaves: dict[str, Any]) -> PyTree:
    """``tree`` with the leaves at the given paths replaced."""
    return jax.tree_util.tree_map_with_path(lambda p, x: leaves.get(path_of(p), x), tree)
