"""Negative log-likelihoods of loss terms, their Fisher matrices, and labels sampled from them."""

import dataclasses
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, Key, Num

Outputs = Array | jax.ShapeDtypeStruct  # a check reads only their shape and dtype


@runtime_checkable
class Likelihood(Protocol):
    """What an ``Objective`` needs from a likelihood; the last axis of outputs belongs to one term.

    Four more members are optional. A class attribute ``one_output`` is true if outputs may lack
    that last axis, with one number for each term. ``kept(targets)`` says which terms the targets
    themselves keep (``Categorical(ignore_index=)``). ``fisher_product(outputs, vector)`` multiplies
    each term's Fisher by a vector shaped like the outputs, where that is cheaper than all columns.
    ``are_probabilities(outputs)`` says whether outputs, which have values, could be probabilities
    where the likelihood expects logits; the attribute ``link`` names what makes them so.
    """

    def check(self, outputs: Outputs, targets: Array, mask: Array | None = None) -> None:
        """Raise ``ValueError`` if targets do not fit the outputs.

        Shapes and dtypes are checked at trace time. Values are checked where they are concrete,
        for the terms that the mask keeps.
        """
        ...

    def terms(self, outputs: Float[Array, "*terms c"], targets: Array) -> Float[Array, "*terms"]:
        """Negative log-likelihood of each term, at least float32."""
        ...

    def sample(self, key: Key[Array, ""], outputs: Float[Array, "*terms c"]) -> Array:
        """Targets drawn from the model, independently for each term."""
        ...

    def fisher_column(
        self, outputs: Float[Array, "*terms c"], index: Int[Array, ""]
    ) -> Float[Array, "*terms c"]:
        r"""Column ``index`` of $S$, where $S S^\top$ is each term's Fisher matrix.

        The Fisher is that of the outputs, ``(c, c)``; $S$ has as many columns as rows.
        """
        ...


def _wide(x: Array) -> Array:
    """At least float32: a bfloat16 logarithm loses the small terms."""
    return x if x.dtype.itemsize >= 4 else x.astype(jnp.float32)


def _expect(what: str, targets: Array, shape: tuple[int, ...], kind: type, expected: str) -> None:
    if targets.shape != shape:
        raise ValueError(f"{what}: targets have shape {targets.shape}, expected {shape}")
    if not jnp.issubdtype(targets.dtype, kind):
        raise ValueError(f"{what}: targets have dtype {targets.dtype}, expected {expected}")


def _concrete_targets(targets: Array, mask: Array | None) -> np.ndarray | None:
    """The targets that the mask keeps, or ``None`` if either is traced and has no values yet."""
    for x in (targets, mask):
        if isinstance(x, Tracer | jax.ShapeDtypeStruct):
            return None
    return np.asarray(targets) if mask is None else np.asarray(targets)[np.asarray(mask)]


def _in_unit_interval(x: np.ndarray) -> bool:
    return bool(((x >= 0) & (x <= 1)).all())  # false for NaN


def _poisoned(
    terms: Float[Array, "*terms"], valid: Bool[Array, "*terms"]
) -> Float[Array, "*terms"]:
    """NaN where a target is invalid. It is a product, so that the gradient is NaN there too."""
    one = jnp.ones((), terms.dtype)
    return terms * jnp.where(valid, one, jnp.full((), jnp.nan, terms.dtype))


@dataclasses.dataclass(frozen=True)
class Categorical:
    """Cross entropy with logits: outputs ``(..., classes)``, targets ``(...)`` of integers.

    Classes out of range raise if their values are concrete. Inside ``jit`` they make value,
    gradient and factors NaN. Targets of masked terms may be anything.

    Args:
        ignore_index: Terms with this target are masked: they are in no sum and no count, as if
            the batch's mask left them out. ``-100`` in PyTorch's convention.
    """

    ignore_index: int | None = None
    link: ClassVar[str] = "softmax"

    def kept(self, targets: Any) -> Any:
        """The mask of terms that ``ignore_index`` keeps, ``None`` for all; shapes give shapes."""
        if self.ignore_index is None:
            return None
        if isinstance(targets, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(targets.shape, bool)
        return targets != self.ignore_index

    def check(self, outputs: Outputs, targets: Array, mask: Array | None = None) -> None:
        _expect("Categorical", targets, outputs.shape[:-1], jnp.integer, "integers (classes)")
        y = _concrete_targets(targets, mask)
        if y is None or not y.size:
            return
        low, high, classes = y.min(), y.max(), outputs.shape[-1]
        if low < 0 or high >= classes:
            raise ValueError(
                f"Categorical: targets run from {low} to {high}, expected classes from 0 to "
                f"{classes - 1}; a term that has no class is left out by the batch's mask"
            )

    def are_probabilities(self, outputs: Float[Array, "*terms c"]) -> bool:
        """Whether all outputs are in [0, 1] and those of each term sum to 1 within 1e-5."""
        x = np.asarray(outputs, np.float64)
        # Probabilities that were rounded to bfloat16 add up to 1 less exactly.
        within = max(1e-5, 2 * float(jnp.finfo(outputs.dtype).eps))
        return _in_unit_interval(x) and bool((abs(x.sum(-1) - 1) <= within).all())

    def terms(self, outputs: Float[Array, "*terms c"], targets: Array) -> Float[Array, "*terms"]:
        logs = jax.nn.log_softmax(_wide(outputs), axis=-1)
        # In int8 the number of classes may not be representable, and the comparison below would
        # wrap.
        index = targets if targets.dtype.itemsize >= 4 else targets.astype(jnp.int32)
        valid = (index >= 0) & (index < outputs.shape[-1])
        # Clipped, so that the program reads in bounds; the default mode would fill NaN into the
        # value but leave the gradient finite.
        picked = jnp.take_along_axis(logs, index[..., None], axis=-1, mode="clip")
        return _poisoned(-picked[..., 0], valid)

    def sample(self, key: Key[Array, ""], outputs: Float[Array, "*terms c"]) -> Array:
        return jax.random.categorical(key, _wide(outputs), axis=-1)

    def fisher_column(
        self, outputs: Float[Array, "*terms c"], index: Int[Array, ""]
    ) -> Float[Array, "*terms c"]:
        # The columns sqrt(p_c) (e_c - p) are as many as the classes, and the sum of their outer
        # products is diag(p) - p p'.
        p = jax.nn.softmax(_wide(outputs), axis=-1)
        one = jax.nn.one_hot(index, p.shape[-1], dtype=p.dtype)
        root = jnp.sqrt(jax.lax.dynamic_index_in_dim(p, index, -1))
        return (root * (one - p)).astype(outputs.dtype)

    def fisher_product(
        self, outputs: Float[Array, "*terms c"], vector: Float[Array, "*terms c"]
    ) -> Float[Array, "*terms c"]:
        p, wide = jax.nn.softmax(_wide(outputs), axis=-1), _wide(vector)
        return (p * (wide - (p * wide).sum(-1, keepdims=True))).astype(vector.dtype)


@dataclasses.dataclass(frozen=True)
class Bernoulli:
    """Binary cross entropy with logits, summed over the last axis; targets in ``[0, 1]``.

    Outputs ``(N,)`` are one logit for each example. Targets out of range raise if their values are
    concrete. Inside ``jit`` they make value, gradient and factors NaN. Targets of masked terms may
    be anything.
    """

    one_output: ClassVar[bool] = True
    link: ClassVar[str] = "sigmoid"

    def check(self, outputs: Outputs, targets: Array, mask: Array | None = None) -> None:
        _expect("Bernoulli", targets, outputs.shape, jnp.floating, "floating")
        y = _concrete_targets(targets, mask)
        if y is not None and not ((y >= 0) & (y <= 1)).all():
            raise ValueError(
                f"Bernoulli: targets run from {y.min()} to {y.max()}, expected probabilities "
                "from 0 to 1; a term that has no target is left out by the batch's mask"
            )

    def are_probabilities(self, outputs: Float[Array, "*terms c"]) -> bool:
        """Whether all outputs are in [0, 1], as some logits are too, and not all equal."""
        x = np.asarray(outputs, np.float64)
        return _in_unit_interval(x) and bool((x != x.flat[0]).any())

    def terms(
        self, outputs: Float[Array, "*terms c"], targets: Num[Array, "*terms c"]
    ) -> Float[Array, "*terms"]:
        logits = _wide(outputs)
        targets = targets.astype(logits.dtype)
        valid = ((targets >= 0) & (targets <= 1)).all(-1)
        # softplus(z) - y z is the cross entropy for any y in [0, 1], finite where a sigmoid has
        # rounded to 0 or 1.
        return _poisoned((jax.nn.softplus(logits) - targets * logits).sum(-1), valid)

    def sample(self, key: Key[Array, ""], outputs: Float[Array, "*terms c"]) -> Array:
        logits = _wide(outputs)
        # Floating labels, because targets of this likelihood are probabilities.
        return jax.random.bernoulli(key, jax.nn.sigmoid(logits)).astype(logits.dtype)

    def fisher_column(
        self, outputs: Float[Array, "*terms c"], index: Int[Array, ""]
    ) -> Float[Array, "*terms c"]:
        p = jax.nn.sigmoid(_wide(outputs))
        one = jax.nn.one_hot(index, p.shape[-1], dtype=p.dtype)
        return (jnp.sqrt(p * (1 - p)) * one).astype(outputs.dtype)

    def fisher_product(
        self, outputs: Float[Array, "*terms c"], vector: Float[Array, "*terms c"]
    ) -> Float[Array, "*terms c"]:
        p = jax.nn.sigmoid(_wide(outputs))
        return (p * (1 - p) * _wide(vector)).astype(vector.dtype)


@dataclasses.dataclass(frozen=True)
class Gaussian:
    r"""Unit-variance Gaussian: $\tfrac12 \lVert f - y \rVert^2$ over the last axis, no constant.

    Outputs ``(N,)`` are one number for each example.
    """

    one_output: ClassVar[bool] = True

    def check(self, outputs: Outputs, targets: Array, mask: Array | None = None) -> None:
        _expect("Gaussian", targets, outputs.shape, jnp.floating, "floating")

    def terms(
        self, outputs: Float[Array, "*terms c"], targets: Float[Array, "*terms c"]
    ) -> Float[Array, "*terms"]:
        wide = _wide(outputs)
        return 0.5 * jnp.square(wide - targets.astype(wide.dtype)).sum(-1)

    def sample(self, key: Key[Array, ""], outputs: Float[Array, "*terms c"]) -> Array:
        wide = _wide(outputs)
        return wide + jax.random.normal(key, wide.shape, wide.dtype)

    def fisher_column(
        self, outputs: Float[Array, "*terms c"], index: Int[Array, ""]
    ) -> Float[Array, "*terms c"]:
        one = jax.nn.one_hot(index, outputs.shape[-1], dtype=outputs.dtype)
        return jnp.broadcast_to(one, outputs.shape)

    def fisher_product(
        self, outputs: Float[Array, "*terms c"], vector: Float[Array, "*terms c"]
    ) -> Float[Array, "*terms c"]:
        return vector


def masked_mean(
    terms: Float[Array, "*terms"], mask: Bool[Array, "*terms"] | None
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Mean of the terms that the mask keeps, and their number; both are 0 if it keeps none."""
    if mask is None:
        return terms.mean(), jnp.asarray(terms.size, terms.dtype)
    count = mask.sum(dtype=terms.dtype)
    kept_terms = jnp.where(mask, terms, jnp.zeros((), terms.dtype))
    return kept_terms.sum() / jnp.maximum(count, jnp.ones((), terms.dtype)), count
