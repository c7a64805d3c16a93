"""Curvature times a vector, for one chunk of a batch, never as a matrix."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxkfac.factors import Batch, Objective, kept_targets, over_count
from jaxkfac.interception import with_leaves

Leaves = dict[str, Array]


class Part(NamedTuple):
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
    """

    objective: Any
    params: Any
    leaves: Leaves
    batch: Any
    labels: Any
    count: Array
    key: Any

    def outputs(self, leaves: Leaves) -> Array:
        """The model's outputs as a function of the chosen leaves."""
        params = with_leaves(self.params, leaves)
        return self.objective.outputs(params, self.batch.inputs, self.key)[0]

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


def gauss_newton(part: Part, vector: Leaves) -> Leaves:
    r"""$J^\top H J v$, with $H$ the Hessian of the loss in the outputs."""
    outputs, vjp = jax.vjp(part.outputs, part.leaves)
    pushed = _push(part, vector)
    curved = jax.jvp(jax.grad(part.loss), (outputs,), (pushed,))[1]
    return vjp(curved)[0]


def fisher_by_columns(part: Part, vector: Leaves) -> Leaves:
    r"""$J^\top S S^\top J v$, with $S$ the likelihood's square root of the outputs' Fisher."""
    outputs, vjp = jax.vjp(part.outputs, part.leaves)
    pushed, likelihood = _push(part, vector), part.objective.likelihood

    def add(index: Array, total: Array) -> Array:
        column = likelihood.fisher_column(outputs, index)
        return total + column * (column * pushed).sum(-1, keepdims=True)

    curved = jax.lax.fori_loop(0, outputs.shape[-1], add, jnp.zeros_like(outputs))
    if part.batch.mask is not None:
        curved = jnp.where(part.batch.mask[..., None], curved, jnp.zeros((), curved.dtype))
    return vjp(over_count(curved, part.count))[0]


def outer_products(part: Part, vector: Leaves) -> Leaves:
    r"""$\frac{1}{NR} \sum_n g_n g_n^\top v$, $g_n$ the gradient of one example's sum of terms.

    Averaged over the samples of ``labels``. The per-example gradients are never formed: this
    is the Jacobian of the vector of losses, multiplied from both sides.
    """
    labels = part.batch.targets[:, None] if part.labels is None else part.labels

    def losses(leaves: Leaves) -> Array:
        outputs = part.outputs(leaves)
        return jax.vmap(lambda one: part.losses(outputs, one), in_axes=1)(labels)

    _, vjp = jax.vjp(losses, part.leaves)
    _, pushed = jax.jvp(losses, (part.leaves,), (vector,))
    scale = part.count.astype(pushed.dtype) * labels.shape[1]
    return vjp(pushed / scale)[0]


def hessian_product(part: Part, vector: Leaves) -> Leaves:
    r"""$\nabla^2 L\, v$, forward over reverse."""
    gradient = jax.grad(lambda leaves: part.loss(part.outputs(leaves)))
    return jax.jvp(gradient, (part.leaves,), (vector,))[1]


def _push(part: Part, vector: Leaves) -> Array:
    return jax.jvp(part.outputs, (part.leaves,), (vector,))[1]
