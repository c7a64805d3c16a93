"""Batches, and calls of a model or a loss with their key and state."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Key, PyTree

from jaxkfac._arguments import ArrayTree, leaves_by_path
from jaxkfac._jaxpr_compat import typed_like
from jaxkfac.interception import check_weights


class Batch(NamedTuple):
    """``(inputs, targets)`` or ``(inputs, targets, mask)``; the mask keeps or weights loss terms.

    Targets and mask are arrays, or trees of them in the form of an ``Objective``'s likelihoods. A
    mask is bool, or holds floating weights of loss terms.
    """

    inputs: ArrayTree
    targets: ArrayTree
    mask: ArrayTree = None

    @property
    def num_examples(self) -> int:
        """How many examples there are."""
        return jax.tree.leaves(self.targets)[0].shape[0]


class CheckedBatch(Batch):
    """A batch whose mask includes what its targets say, as ``Objective.batch`` returns it.

    One use of a batch calls another with it. Weights of classes must not enter the mask twice.
    """

    __slots__ = ()


class ModelCall(NamedTuple):
    """The arguments of one call of a model or a loss: the point at which it is linearized.

    Attributes:
        params: The parameters, a tree of arrays.
        batch: A ``Batch``, or whatever a scalar loss takes.
        key: The model's own key, for dropout; ``None`` if it takes none.
        state: What a call changes (batch statistics); ``None`` if nothing.

    For a trace, shapes may stand for all of these.
    """

    params: ArrayTree
    batch: Any
    key: Key[Array, ""] | None = None
    state: ArrayTree | None = None


def as_batch(batch: ArrayTree) -> Batch:
    """Check a batch's form.

    Raises:
        ValueError: not a pair or triple, an empty array, a mask that keeps nothing, or weights
            that are negative or not finite.
        TypeError: a mask that is no array.
    """
    if not isinstance(batch, tuple | list) or len(batch) not in (2, 3):
        raise ValueError(
            f"batch: expected (inputs, targets) or (inputs, targets, mask), got {form_of(batch)}"
        )
    out = Batch(*batch)
    for what, tree in (("inputs", out.inputs), ("targets", out.targets)):
        for leaf in jax.tree.leaves(tree):
            if 0 in getattr(leaf, "shape", (1,)):
                raise ValueError(f"batch: {what} are empty (shape {leaf.shape})")
            if not hasattr(leaf, "shape"):
                raise ValueError(f"batch: {what} must be arrays, got {form_of(leaf)}")
    for at, mask in jax.tree_util.tree_leaves_with_path(out.mask):
        what = f"batch: the mask{jax.tree_util.keystr(at)}"
        # A list in place of an array comes as its numbers, so the message names the whole mask.
        if not hasattr(mask, "shape"):
            check_array("batch: the mask", out.mask)
        if mask.dtype != jnp.bool_ and not jnp.issubdtype(mask.dtype, jnp.floating):
            raise ValueError(
                f"{what} has dtype {mask.dtype}, expected bool (write mask > 0), or floating "
                "weights of loss terms"
            )
        check_weights(what, mask)
    # `None` is an entry of its own, for "all terms", and must not vanish from the tree of masks.
    if all(map(_keeps_none, jax.tree.leaves(out.mask, is_leaf=lambda x: x is None))):
        raise ValueError("batch: the mask masks every loss term, so there is no mean")
    return out


def _keeps_none(mask: Any) -> bool:
    """Whether the values show that a mask keeps no term; a traced mask shows nothing."""
    has_values = mask is not None and not isinstance(mask, Tracer | jax.ShapeDtypeStruct)
    return has_values and not np.asarray(mask).any()


def check_array(what: str, x: object) -> None:
    """Refuse what is not an array; ``jax.numpy`` refuses lists in the same way."""
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise TypeError(f"{what}: expected an array, got {form_of(x)}; write jnp.asarray(...)")


def form_of(x: object) -> str:
    """What a value is, in words: a sequence with its length, or an array with its shape."""
    if isinstance(x, tuple | list):
        return f"a {type(x).__name__} of {len(x)}"
    shape = getattr(x, "shape", None)
    return type(x).__name__ if shape is None else f"{type(x).__name__} of shape {shape}"


def takes_key(fn: Callable[..., Any]) -> bool:
    """Whether a function has a ``key`` argument."""
    return "key" in parameters_of(fn)


def returned(
    what: str, fn: Callable[..., Any], args: tuple[Any, ...], key: Any, state: PyTree, has_aux: bool
) -> tuple[Any, Any]:
    """``(result, beside)`` of a function that may take a key and a state.

    Args:
        what: What to call the function in an error.
        fn: Returns ``result``, or ``(result, aux)`` with ``has_aux``. With a state it returns a
            pair of that and the changed state.
        args: Its positional arguments.
        key: Passed on if the function takes one.
        state: Passed on if there is one.
        has_aux: See ``fn``.

    Returns:
        The result, and what came with it: ``None``, ``aux``, ``changed`` or ``(aux, changed)``.

    Raises:
        TypeError: a state is given and the function takes none.
        ValueError: the function takes a state and none is given; it does not return the expected
            pair; or its changed state has entries that the given one lacks.
    """
    kwargs = {"key": key} if takes_key(fn) else {}
    if state is None:
        _check_stateless(what, fn)
        out = fn(*args, **kwargs)
        return _pair(what, out, "aux") if has_aux else (out, None)
    if "state" not in parameters_of(fn):
        raise TypeError(
            f"state=: {what} takes none; write one with a state= argument that returns "
            "(outputs, changed), or jk.from_nnx(model, mutable=...)"
        )
    out, changed = _pair(what, fn(*args, **kwargs, state=state), "changed")
    new = leaves_by_path(changed).keys() - leaves_by_path(state).keys()
    if new:
        raise ValueError(
            f"{what}: the changed state has {min(new)!r}, which state= has not: return it in "
            f"the form in which it was passed, and new values beside the outputs, with has_aux"
        )
    # A state of other types would compile the next step anew.
    if jax.tree.structure(changed) == jax.tree.structure(state):
        changed = jax.tree.map(lambda x, old: typed_like(x, jax.typeof(old)), changed, state)
    if not has_aux:
        return out, changed
    out, aux = _pair(what, out, "aux")
    return out, (aux, changed)


def _check_stateless(what: str, fn: Callable[..., Any]) -> None:
    """Refuse a call without the state that a function needs: it would start anew each time."""
    parameter = parameters_of(fn).get("state")
    needed = parameter is not None and parameter.default is inspect.Parameter.empty
    if needed or getattr(fn, "state", None) is not None:
        raise ValueError(
            f"{what} changes a state, and none is given: pass state=, at first apply_fn.state or "
            "the model's own, and then the state that each call returns, as in (value, state), "
            "grads, factors "
            "= stats(params, batch, key, state=state)"
        )


def _pair(what: str, out: Any, second: str) -> tuple[Any, Any]:
    if isinstance(out, tuple) and len(out) == 2:
        return out
    raise ValueError(f"{what}: expected a pair (..., {second}) in return, got {form_of(out)}")


def parameters_of(fn: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters of a function; none where Python does not know them."""
    try:
        return inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return {}
