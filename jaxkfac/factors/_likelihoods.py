"""Negative log-likelihoods: terms, and labels sampled from the model."""

import dataclasses
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, Key, Num

Outputs = Array | jax.ShapeDtypeStruct  # their shape and dtype are all that a check reads


@runtime_checkable
class Likelihood(Protocol):
    """What an ``Objective`` asks of a likelihood; the last axis of outputs is one term's.

    Three things more are asked where they are there: a class attribute ``one_output``, true if
    outputs without that last axis are one number for each term; ``kept(targets)``, which terms
    the targets themselves leave out (``Categorical(ignore_index=)``); and
    ``fisher_product(outputs, vector)``, each term's Fisher times a vector like the outputs, where
    that is less work than all columns are.
    """

    def check(self, outputs: Outputs, targets: Array, mask: Array | None = None) -> None:
        """Raise ``ValueError`` if targets do not fit the outputs.

        Shapes and dtypes are checked at trace time; values of the terms that the mask keeps,
        where they are concrete.
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


def _expect(what: str, targets: Array, shape: tuple[int, ...], kind: type, words: str) -> None:
    if targets.shape != shape:
        raise ValueError(f"{what}: targets have shape {targets.shape}, expected {shape}")
    if not jnp.issubdtype(targets.dtype, kind):
        raise ValueError(f"{what}: targets have dtype {targets.dtype}, expected {words}")


def _kept(targets: Array, mask: Array | None) -> np.ndarray | None:
    """The targets that the mask keeps, or ``None`` where values are not known yet."""
    for x in (targets, mask):
        if isinstance(x, Tracer | jax.ShapeDtypeStruct):
            return None
    return np.asarray(targets) if mask is None else np.asarray(targets)[np.asarray(mask)]


def _poisoned(
    terms: Float[Array, "*terms"], valid: Bool[Array, "*terms"]
) -> Float[Array, "*terms"]:
    """NaN where a target is invalid; a product, so that the gradient is NaN there too."""
    one = jnp.ones((), terms.dtype)
    return terms * jnp.where(valid, one, jnp.full((), jnp.nan, terms.dtype))


@dataclasses.dataclass(frozen=True)
class Categorical:
    """Cross entropy with logits: outputs ``(..., classes)``, targets ``(...)`` of integers.

    Classes out of range raise where they can be seen; inside ``jit`` they make value, gradient
    and factors NaN. Targets of masked terms may be anything.

    Args:
        ignore_index: Terms with this target are masked: they are in no sum and no count, as if
            the batch's mask left them out. ``-100`` in PyTorch's convention.
    """

    ignore_index: int | None = None

    def kept(self, targets: Any) -> Any:
        """Which terms ``ignore_index`` leaves, ``None`` for all of them; of shapes, the shape."""
        if self.ignore_index is None:
            return None
        if isinstance(targets, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(targets.shape, bool)
        return targets != self.ignore_index

    def check(self, outputs: Outputs, targets: Array, mask: Array | None = None) -> None:
        _expect("Categorical", targets, outputs.shape[:-1], jnp.integer, "integers (classes)")
        kept = _kept(targets, mask)
        if kept is None or not kept.size:
            return
        low, high, classes = kept.min(), kept.max(), outputs.shape[-1]
        if low < 0 or high >= classes:
            raise ValueError(
                f"Categorical: targets run from {low} to {high}, expected classes from 0 to "
                f"{classes - 1}; a term that has no class is left out by the batch's mask"
            )

    def terms(self, outputs: Float[Array, "*terms c"], targets: Array) -> Float[Array, "*terms"]:
        logs = jax.nn.log_softmax(_wide(outputs), axis=-1)
        index = targets if targets.dtype.itemsize >= 4 else targets.astype(jnp.int32)
        valid = (index >= 0) & (index < outputs.shape[-1])
        picked = jnp.take_along_axis(logs, index[..., None], axis=-1, mode="clip")
        return _poisoned(-picked[..., 0], valid)

    def sample(self, key: Key[Array, ""], outputs: Float[Array, "*terms c"]) -> Array:
        return jax.random.categorical(key, _wide(outputs), axis=-1)

    def fisher_column(
        self, outputs: Float[Array, "*terms c"], index: Int[Array, ""]
    ) -> Float[Array, "*terms c"]:
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

    Outputs ``(N,)`` are one logit for each example. Targets out of range raise where they can be
    seen; inside ``jit`` they make value, gradient and factors NaN. Targets of masked terms may be
    anything.
    """

    one_output: ClassVar[bool] = True

    def check(self, outputs: Outputs, targets: Array, mask: Array | None = None) -> None:
        _expect("Bernoulli", targets, outputs.shape, jnp.floating, "floating")
        kept = _kept(targets, mask)
        if kept is not None and not ((kept >= 0) & (kept <= 1)).all():
            raise ValueError(
                f"Bernoulli: targets run from {kept.min()} to {kept.max()}, expected probabilities "
                "from 0 to 1; a term that has no target is left out by the batch's mask"
            )

    def terms(
        self, outputs: Float[Array, "*terms c"], targets: Num[Array, "*terms c"]
    ) -> Float[Array, "*terms"]:
        logits = _wide(outputs)
        targets = targets.astype(logits.dtype)
        valid = ((targets >= 0) & (targets <= 1)).all(-1)
        return _poisoned((jax.nn.softplus(logits) - targets * logits).sum(-1), valid)

    def sample(self, key: Key[Array, ""], outputs: Float[Array, "*terms c"]) -> Array:
        logits = _wide(outputs)
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
    """Mean of the terms that the mask keeps, and their number; 0 and 0 if it keeps none."""
    if mask is None:
        return terms.mean(), jnp.asarray(terms.size, terms.dtype)
    count = mask.sum(dtype=terms.dtype)
    kept = jnp.where(mask, terms, jnp.zeros((), terms.dtype))
    return kept.sum() / jnp.maximum(count, jnp.ones((), terms.dtype)), count
