"""Arguments that every package takes, refused in words: apply functions and trees of arrays."""

from collections.abc import Iterable
from typing import Any

import jax
from flax import linen, nnx
from jaxtyping import PyTree

from jaxkfac._checks import named


def check_function(what: str, fn: Any, form: str = "apply_fn(params, inputs)") -> None:
    """Refuse what is no function of parameters: a model, say.

    Raises:
        TypeError: naming what it is, and how a model becomes a function.
    """
    if isinstance(fn, nnx.Module):
        raise TypeError(
            f"{what}: expected a function {form}, got the model {named(fn)}; write apply_fn, "
            "params = jk.from_nnx(model)"
        )
    if isinstance(fn, linen.Module):
        raise TypeError(
            f"{what}: expected a function {form}, got the model {named(fn)}; write model.apply, "
            "with the parameters that model.init returned"
        )
    if not callable(fn):
        raise TypeError(f"{what}: expected a function {form}, got {named(fn)}")


def check_arrays(what: str, tree: PyTree) -> None:
    """Refuse a tree that holds anything else than arrays, their shapes, and numbers.

    Raises:
        TypeError: naming the first leaf that is none.
    """
    if isinstance(tree, nnx.Module | linen.Module):
        remedy = "apply_fn, params = jk.from_nnx(model)"
        remedy = remedy if isinstance(tree, nnx.Module) else "params = model.init(key, inputs)"
        raise TypeError(
            f"{what}: expected a tree of arrays, got the model {named(tree)}; write {remedy}"
        )
    for leaf in jax.tree.leaves(tree):
        array = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
        if not array and not isinstance(leaf, bool | int | float | complex):
            remedy = ""
            if callable(leaf):  # an activation is a leaf of Equinox's models
                remedy = "; of an Equinox model, eqx.partition(model, eqx.is_inexact_array)[0]"
            raise TypeError(f"{what}: expected a tree of arrays, got {named(leaf)} in it{remedy}")


def check_params(paths: Iterable[str]) -> None:
    """Refuse parameters with Linen's batch statistics among them: an optimizer would step them.

    Raises:
        ValueError: naming the first one.
    """
    wrong = [path for path in paths if "batch_stats" in path.split("/")]
    if wrong:
        raise ValueError(
            f"params: {wrong[0]!r} is a batch statistic, not a parameter; pass "
            "variables['params'], and the rest as state= of an apply_fn(params, inputs, state) "
            "that returns model.apply({'params': params, **state}, inputs, mutable=list(state))"
        )
