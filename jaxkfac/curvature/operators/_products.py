"""Curvature times a vector, for one chunk of a batch, never as a matrix."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxkfac.factors import (
    Batch,
    Bernoulli,
    Categorical,
    Gaussian,
    Objective,
    kept_targets,
    over_count,
)
from jaxkfac.interception import with_leaves

Leaves = dict[str, Array]


class Chunk(NamedTuple):
    """One chunk of the problem.

    Attributes:
        objective: The objective.
        params: All parameters.
        leaves: ``{path: parameter}`` of those the operator acts on; only these are
            differentiated.
        batch: The chunk's examples.
        labels: ``(n, samples, *targets)``, or ``None`` for the given targets.
        count: Number of loss terms of the *whole* batch, by which a sum becomes its share
            of the mean. Dividing first keeps 16-bit cotangents in range.
        key: For dropout, or ``None``.
        state: What a call of the model changes, or ``None``.
    """

    objective: Any
    params: Any
    leaves: Leaves
    batch: Any
    labels: Any
    count: Array
    key: Any
    state: Any = None

    def outputs(self, leaves: Leaves) -> Array:
        """The model's outputs as a function of the chosen leaves."""
        params = with_leaves(self.params, leaves)
        return self.objective.outputs(params, self.batch.inputs, self.key, self.state)[0]

    def losses(self, outputs: Array, targets: Array) -> Array:
        """Each example's sum of the kept terms, ``(n,)``."""
        terms = example_terms(self.objective, outputs, targets, self.batch)
        return terms.reshape(terms.shape[0], -1).sum(-1)

    def loss(self, outputs: Array) -> Array:
        """The chunk's share of the mean loss."""
        total = self.losses(outputs, self.batch.targets).sum()
        return total / self.count.astype(total.dtype)


def example_terms(objective: Objective, outputs: Array, targets: Array, batch: Batch) -> Array:
    """Every loss term, 0 where the mask drops it."""
    objective.check(outputs, targets, batch.mask)
    terms = objective.likelihood.terms(outputs, kept_targets(targets, batch.mask))
    if batch.mask is None:
        return terms
    return jnp.where(batch.mask, terms, jnp.zeros((), terms.dtype))


def gauss_newton(chunk: Chunk, vector: Leaves) -> Leaves:
    r"""$J^\top H J v$, with $H$ the Hessian of the loss in the outputs."""
    outputs, vjp = jax.vjp(chunk.outputs, chunk.leaves)
    pushed = _push(chunk, vector)
    curved = jax.jvp(jax.grad(chunk.loss), (outputs,), (pushed,))[1]
    return vjp(curved)[0]


def expected_products(chunk: Chunk, vector: Leaves) -> Leaves:
    r"""$J^\top H J v$, with $H$ the Fisher of the outputs: their Hessian in natural parameters."""
    natural = isinstance(chunk.objective.likelihood, Categorical | Bernoulli | Gaussian)
    return (gauss_newton if natural else fisher_by_columns)(chunk, vector)


def fisher_by_columns(chunk: Chunk, vector: Leaves) -> Leaves:
    r"""$J^\top S S^\top J v$, with $S$ the likelihood's square root of the outputs' Fisher."""
    outputs, vjp = jax.vjp(chunk.outputs, chunk.leaves)
    pushed, likelihood = _push(chunk, vector), chunk.objective.likelihood

    def add(index: Array, total: Array) -> Array:
        column = likelihood.fisher_column(outputs, index)
        return total + column * (column * pushed).sum(-1, keepdims=True)

    curved = jax.lax.fori_loop(0, outputs.shape[-1], add, jnp.zeros_like(outputs))
    if chunk.batch.mask is not None:
        curved = jnp.where(chunk.batch.mask[..., None], curved, jnp.zeros((), curved.dtype))
    return vjp(over_count(curved, chunk.count))[0]


def outer_products(chunk: Chunk, vector: Leaves) -> Leaves:
    r"""$\frac{1}{NR} \sum_n g_n g_n^\top v$, $g_n$ the gradient of one example's sum of terms.

    Averaged over the samples of ``labels``. The per-example gradients are never formed: this
    is the Jacobian of the vector of losses, multiplied from both sides.
    """
    labels = chunk.batch.targets[:, None] if chunk.labels is None else chunk.labels

    def losses(leaves: Leaves) -> Array:
        outputs = chunk.outputs(leaves)
        return jax.vmap(lambda one: chunk.losses(outputs, one), in_axes=1)(labels)

    _, vjp = jax.vjp(losses, chunk.leaves)
    _, pushed = jax.jvp(losses, (chunk.leaves,), (vector,))
    scale = chunk.count.astype(pushed.dtype) * labels.shape[1]
    return vjp(pushed / scale)[0]


def hessian_product(chunk: Chunk, vector: Leaves) -> Leaves:
    r"""$\nabla^2 L\, v$, forward over reverse."""
    gradient = jax.grad(lambda leaves: chunk.loss(chunk.outputs(leaves)))
    return jax.jvp(gradient, (chunk.leaves,), (vector,))[1]


def _push(chunk: Chunk, vector: Leaves) -> Array:
    return jax.jvp(chunk.outputs, (chunk.leaves,), (vector,))[1]
