"""An objective: a model's apply function and a likelihood."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Key, PyTree

from jaxkfac.factors._likelihoods import Likelihood, Outputs, masked_mean


class Batch(NamedTuple):
    """``(inputs, targets)`` or ``(inputs, targets, mask)``; the mask keeps loss terms."""

    inputs: PyTree
    targets: Array
    mask: Bool[Array, "..."] | None = None


def as_batch(batch: PyTree) -> Batch:
    """Check a batch's form.

    Raises:
        ValueError: not a pair or triple, an empty array, or a mask that keeps nothing.
        TypeError: a mask that is no array.
    """
    if not isinstance(batch, tuple | list) or len(batch) not in (2, 3):
        raise ValueError(
            f"batch: expected (inputs, targets) or (inputs, targets, mask), got {_form(batch)}"
        )
    out = Batch(*batch)
    for what, tree in (("inputs", out.inputs), ("targets", out.targets)):
        for leaf in jax.tree.leaves(tree):
            if 0 in getattr(leaf, "shape", (1,)):
                raise ValueError(f"batch: {what} are empty (shape {leaf.shape})")
            if not hasattr(leaf, "shape"):
                raise ValueError(f"batch: {what} must be arrays, got {_form(leaf)}")
    if out.mask is not None:
        check_array("batch: the mask", out.mask)
        if out.mask.dtype != jnp.bool_:
            raise ValueError(
                f"batch: the mask has dtype {out.mask.dtype}, expected bool (write mask > 0)"
            )
        abstract = isinstance(out.mask, Tracer | jax.ShapeDtypeStruct)
        if not abstract and not np.asarray(out.mask).any():
            raise ValueError("batch: the mask masks every loss term, so there is no mean")
    return out


def check_array(what: str, x: object) -> None:
    """Refuse what is no array, as ``jax.numpy`` refuses lists."""
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise TypeError(f"{what}: expected an array, got {_form(x)}; write jnp.asarray(...)")


def _form(x: object) -> str:
    if isinstance(x, tuple | list):
        return f"a {type(x).__name__} of {len(x)}"
    shape = getattr(x, "shape", None)
    return type(x).__name__ if shape is None else f"{type(x).__name__} of shape {shape}"


def takes_key(fn: Callable[..., Any]) -> bool:
    """Whether a function has a ``key`` argument."""
    return "key" in _parameters(fn)


def returned(
    what: str, fn: Callable[..., Any], args: tuple[Any, ...], key: Any, state: PyTree, has_aux: bool
) -> tuple[Any, Any]:
    """``(result, beside)`` of a function that may take a key and a state.

    Args:
        what: What to call the function in an error.
        fn: Returns ``result``, or ``(result, aux)`` with ``has_aux``; with a state, a pair of
            that and the changed state.
        args: Its arguments.
        key: Passed on if the function takes one.
        state: Passed on if there is one.
        has_aux: See ``fn``.

    Returns:
        What was returned beside the result: ``None``, ``aux``, ``changed`` or ``(aux, changed)``.

    Raises:
        TypeError: a state that the function does not take.
        ValueError: the function takes a state and none is given, or what it returns is no pair.
    """
    kwargs = {"key": key} if takes_key(fn) else {}
    if state is None:
        _check_stateless(what, fn)
        out = fn(*args, **kwargs)
        return _pair(what, out, "aux") if has_aux else (out, None)
    if "state" not in _parameters(fn):
        raise TypeError(
            f"state=: {what} takes none; write one with a state= argument that returns "
            "(outputs, changed), or jk.from_nnx(model, mutable=...)"
        )
    out, changed = _pair(what, fn(*args, **kwargs, state=state), "changed")
    if not has_aux:
        return out, changed
    out, aux = _pair(what, out, "aux")
    return out, (aux, changed)


def _check_stateless(what: str, fn: Callable[..., Any]) -> None:
    """Refuse a function whose state is missing: it would start from the first one each time."""
    parameter = _parameters(fn).get("state")
    needed = parameter is not None and parameter.default is inspect.Parameter.empty
    if needed or getattr(fn, "state", None) is not None:
        raise ValueError(
            f"{what} changes a state, and none is given: pass state=, at first apply_fn.state or "
            "the model's own, and carry on what comes back, as in (value, state), grads, factors "
            "= stats(params, batch, key, state=state)"
        )


def _pair(what: str, out: Any, second: str) -> tuple[Any, Any]:
    if isinstance(out, tuple) and len(out) == 2:
        return out
    raise ValueError(f"{what}: expected a pair (..., {second}) in return, got {_form(out)}")


def _parameters(fn: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return {}


def kept_targets(targets: Array, mask: Array | None) -> Array:
    """``targets`` with 0 at masked terms: a NaN there would come back in the gradient."""
    if mask is None or targets.shape[: mask.ndim] != mask.shape:  # not one target for each term
        return targets
    mask = jnp.expand_dims(mask, tuple(range(mask.ndim, targets.ndim)))
    return jnp.where(mask, targets, jnp.zeros((), targets.dtype))


@dataclasses.dataclass(frozen=True)
class Objective:
    """Mean negative log-likelihood of a model.

    Args:
        apply_fn: ``apply_fn(params, inputs) -> outputs``, or with a ``key=`` argument for
            dropout, or with a ``state=`` argument for what a call changes (batch statistics):
            then it returns ``(outputs, changed)``. Outputs have the examples first and one
            term's outputs last: ``(N, classes)``, ``(N, tokens, vocabulary)``.
        likelihood: ``Categorical()``, ``Bernoulli()`` or ``Gaussian()``.
        has_aux: Whether ``apply_fn`` returns ``(outputs, aux)``, with a state
            ``((outputs, aux), changed)``.

    Example:
        >>> import jax.numpy as jnp, jaxkfac as jk
        >>> objective = jk.Objective(lambda p, x: x @ p, jk.Gaussian())
        >>> float(objective(jnp.ones((2, 1)), (jnp.ones((3, 2)), jnp.zeros((3, 1)))))
        2.0
    """

    apply_fn: Callable[..., Any]
    likelihood: Likelihood
    has_aux: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.likelihood, type):
            name = self.likelihood.__name__
            raise TypeError(f"likelihood: expected an instance, write jk.{name}()")
        if not isinstance(self.likelihood, Likelihood):
            raise TypeError(
                "likelihood: expected jk.Categorical(), jk.Bernoulli(), jk.Gaussian(), or an "
                "object with their methods check, terms, sample and fisher_column, got "
                f"{self.likelihood!r}"
            )

    def outputs(
        self,
        params: PyTree,
        inputs: PyTree,
        key: Key[Array, ""] | None = None,
        state: PyTree | None = None,
    ) -> tuple[Float[Array, "n *terms c"], Any]:
        """The outputs, and what comes beside them; see ``returned``."""
        outputs, beside = returned(
            "apply_fn", self.apply_fn, (params, inputs), key, state, self.has_aux
        )
        if not hasattr(outputs, "ndim") or outputs.ndim < 2:
            raise ValueError(
                f"apply_fn: expected one array of outputs (examples, ..., outputs), got "
                f"{_form(outputs)}"
            )
        if not jnp.issubdtype(outputs.dtype, jnp.floating):
            raise ValueError(f"apply_fn: outputs have dtype {outputs.dtype}, expected floating")
        return outputs, beside

    def loss(
        self, outputs: Float[Array, "n *terms c"], targets: Array, mask: Array | None
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """``(mean over the kept terms, their number)``."""
        self.check(outputs, targets, mask)
        return masked_mean(self.likelihood.terms(outputs, kept_targets(targets, mask)), mask)

    def check(self, outputs: Outputs, targets: Array, mask: Array | None) -> None:
        """Refuse targets or a mask that do not fit the outputs."""
        expected = outputs.shape[:-1]
        if mask is not None and mask.shape != expected:
            raise ValueError(
                f"batch: the mask has shape {mask.shape}, expected one entry per loss term, "
                f"{expected}"
            )
        self.likelihood.check(outputs, targets, mask)

    def __call__(
        self,
        params: PyTree,
        batch: PyTree,
        key: Key[Array, ""] | None = None,
        state: PyTree | None = None,
    ) -> Any:
        """Mean negative log-likelihood over the batch.

        ``(loss, aux)`` with ``has_aux``, ``(loss, changed)`` with a state, and with both
        ``(loss, (aux, changed))``.
        """
        inputs, targets, mask = as_batch(batch)
        outputs, beside = self.outputs(params, inputs, key, state)
        value, _ = self.loss(outputs, targets, mask)
        return (value, beside) if self.has_aux or state is not None else value
