"""Negative log-likelihoods: terms, and labels sampled from the model."""

import dataclasses
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key, Num


@runtime_checkable
class Likelihood(Protocol):
    """What an ``Objective`` asks of a likelihood; the last axis of outputs is one term's."""

    def check(self, outputs: Array, targets: Array) -> None:
        """Raise ``ValueError`` at trace time if targets do not fit the outputs."""
        ...

    def terms(self, outputs: Float[Array, "*terms c"], targets: Array) -> Float[Array, "*terms"]:
        """Negative log-likelihood of each term, at least float32."""
        ...

    def sample(self, key: Key[Array, ""], outputs: Float[Array, "*terms c"]) -> Array:
        """Targets drawn from the model, independently for each term."""
        ...


def _wide(x: Array) -> Array:
    """At least float32: a bfloat16 logarithm loses the small terms."""
    return x if x.dtype.itemsize >= 4 else x.astype(jnp.float32)


def _expect(what: str, targets: Array, shape: tuple[int, ...], kind: type, words: str) -> None:
    if targets.shape != shape:
        raise ValueError(f"{what}: targets have shape {targets.shape}, expected {shape}")
    if not jnp.issubdtype(targets.dtype, kind):
        raise ValueError(f"{what}: targets have dtype {targets.dtype}, expected {words}")


@dataclasses.dataclass(frozen=True)
class Categorical:
    """Cross entropy with logits: outputs ``(..., classes)``, targets ``(...)`` of integers.

    Targets out of range give NaN, as ``optax`` does, so that they are seen.
    """

    def check(self, outputs: Array, targets: Array) -> None:
        _expect("Categorical", targets, outputs.shape[:-1], jnp.integer, "integers (classes)")

    def terms(self, outputs: Float[Array, "*terms c"], targets: Array) -> Float[Array, "*terms"]:
        logs = jax.nn.log_softmax(_wide(outputs), axis=-1)
        picked = jnp.take_along_axis(logs, targets[..., None], axis=-1, mode="fill")
        return -picked[..., 0]

    def sample(self, key: Key[Array, ""], outputs: Float[Array, "*terms c"]) -> Array:
        return jax.random.categorical(key, _wide(outputs), axis=-1)


@dataclasses.dataclass(frozen=True)
class Bernoulli:
    """Binary cross entropy with logits, summed over the last axis; targets in ``[0, 1]``."""

    def check(self, outputs: Array, targets: Array) -> None:
        _expect("Bernoulli", targets, outputs.shape, jnp.floating, "floating")

    def terms(
        self, outputs: Float[Array, "*terms c"], targets: Num[Array, "*terms c"]
    ) -> Float[Array, "*terms"]:
        logits = _wide(outputs)
        targets = targets.astype(logits.dtype)
        return (jax.nn.softplus(logits) - targets * logits).sum(-1)

    def sample(self, key: Key[Array, ""], outputs: Float[Array, "*terms c"]) -> Array:
        logits = _wide(outputs)
        return jax.random.bernoulli(key, jax.nn.sigmoid(logits)).astype(logits.dtype)


@dataclasses.dataclass(frozen=True)
class Gaussian:
    r"""Unit-variance Gaussian: $\tfrac12 \lVert f - y \rVert^2$ over the last axis, no constant."""

    def check(self, outputs: Array, targets: Array) -> None:
        _expect("Gaussian", targets, outputs.shape, jnp.floating, "floating")

    def terms(
        self, outputs: Float[Array, "*terms c"], targets: Float[Array, "*terms c"]
    ) -> Float[Array, "*terms"]:
        wide = _wide(outputs)
        return 0.5 * jnp.square(wide - targets.astype(wide.dtype)).sum(-1)

    def sample(self, key: Key[Array, ""], outputs: Float[Array, "*terms c"]) -> Array:
        wide = _wide(outputs)
        return wide + jax.random.normal(key, wide.shape, wide.dtype)


def masked_mean(
    terms: Float[Array, "*terms"], mask: Bool[Array, "*terms"] | None
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Mean of the terms that the mask keeps, and their number; 0 and 0 if it keeps none."""
    if mask is None:
        return terms.mean(), jnp.asarray(terms.size, terms.dtype)
    count = mask.sum(dtype=terms.dtype)
    kept = jnp.where(mask, terms, jnp.zeros((), terms.dtype))
    return kept.sum() / jnp.maximum(count, jnp.ones((), terms.dtype)), count
