"""An objective: a model's apply function and a likelihood."""

import dataclasses
import inspect
from collections.abc import Callable
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
    try:
        return "key" in inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return False


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
            dropout. Outputs have the examples first and one term's outputs last:
            ``(N, classes)``, ``(N, tokens, vocabulary)``.
        likelihood: ``Categorical()``, ``Bernoulli()`` or ``Gaussian()``.
        has_aux: Whether ``apply_fn`` returns ``(outputs, aux)``.

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
        self, params: PyTree, inputs: PyTree, key: Key[Array, ""] | None = None
    ) -> tuple[Float[Array, "n *terms c"], Any]:
        """``(outputs, aux)``; the key is passed on if the function takes one."""
        kwargs = {"key": key} if takes_key(self.apply_fn) else {}
        out = self.apply_fn(params, inputs, **kwargs)
        outputs, aux = out if self.has_aux else (out, None)
        if not hasattr(outputs, "ndim") or outputs.ndim < 2:
            raise ValueError(
                f"apply_fn: expected one array of outputs (examples, ..., outputs), got "
                f"{_form(outputs)}"
            )
        if not jnp.issubdtype(outputs.dtype, jnp.floating):
            raise ValueError(f"apply_fn: outputs have dtype {outputs.dtype}, expected floating")
        return outputs, aux

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

    def __call__(self, params: PyTree, batch: PyTree, key: Key[Array, ""] | None = None) -> Any:
        """Mean negative log-likelihood over the batch; ``(loss, aux)`` with ``has_aux``."""
        inputs, targets, mask = as_batch(batch)
        outputs, aux = self.outputs(params, inputs, key)
        value, _ = self.loss(outputs, targets, mask)
        return (value, aux) if self.has_aux else value
