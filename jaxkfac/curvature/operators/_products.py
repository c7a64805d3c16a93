"""Products of the curvature of one chunk of a batch with a vector, without forming a matrix."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Num

from jaxkfac._arguments import ArrayTree, with_leaves
from jaxkfac.factors import (
    Batch,
    Bernoulli,
    Categorical,
    Estimator,
    Gaussian,
    Head,
)
from jaxkfac.linalg import statistics_dtype

Leaves = dict[str, Array]


class Chunk(NamedTuple):
    """One chunk of the problem.

    Attributes:
        objective: The objective.
        params: All parameters.
        leaves: ``{path: parameter}`` of those the operator acts on; only these are
            differentiated.
        batch: The chunk's examples.
        labels: ``(n, samples, *targets)``, or ``None`` for the given targets; or an
            ``Estimator`` for each example, stacked.
        counts: For each output, ``Head.count`` of the *full* batch. A sum divided by it is the
            chunk's share of the mean. Dividing first keeps 16-bit cotangents in range.
        key: For dropout, or ``None``.
        state: What a call of the model changes, or ``None``.
    """

    objective: Any
    params: Any
    leaves: Leaves
    batch: Any
    labels: Any
    counts: Any
    key: Any
    state: Any = None

    def outputs(self, leaves: Leaves) -> ArrayTree:
        """The model's outputs as a function of the chosen leaves."""
        params = with_leaves(self.params, leaves)
        return self.objective.outputs(params, self.batch.inputs, self.key, self.state)[0]

    def heads(self, outputs: ArrayTree, targets: ArrayTree = None) -> list[Head]:
        """Each output with its likelihood, targets and mask."""
        return self.objective.heads(outputs, targets, self.batch.mask)

    def losses(self, outputs: ArrayTree, targets: ArrayTree, *, root: bool = False) -> list[Array]:
        """For each output, each example's sum of kept terms, ``(n,)``; see ``Head.kept_terms``."""
        sums = []
        for head in self.heads(outputs, targets):
            head.check()
            kept_terms = head.kept_terms(root=root)
            sums.append(kept_terms.reshape(head.outputs.shape[0], -1).sum(-1))
        return sums

    def loss(self, outputs: ArrayTree) -> Array:
        """The chunk's share of the loss, which is the sum of the outputs' means."""
        sums = self.losses(outputs, self.batch.targets)
        shares = [s.sum() / n.astype(s.dtype) for s, n in zip(sums, self.counts, strict=True)]
        return functools.reduce(jnp.add, shares)


def gauss_newton(chunk: Chunk, vector: Leaves) -> Leaves:
    r"""$J^\top H J v$, with $H$ the Hessian of the loss in the outputs."""
    outputs, vjp = jax.vjp(chunk.outputs, chunk.leaves)
    pushed = _push(chunk, vector)
    # The Hessian in the outputs only, so the model itself is differentiated once in each direction,
    # and its second derivatives never enter.
    curved = jax.jvp(jax.grad(chunk.loss), (outputs,), (pushed,))[1]
    return vjp(curved)[0]


def expected_products(chunk: Chunk, vector: Leaves) -> Leaves:
    r"""$J^\top H J v$, with $H$ the Fisher of the outputs.

    For natural parameters that is their Hessian, and ``gauss_newton`` is cheaper.
    """
    return (gauss_newton if _is_natural(chunk) else fisher_by_columns)(chunk, vector)


def _is_natural(chunk: Chunk) -> bool:
    """Whether all outputs are natural parameters of their likelihoods."""
    likelihoods = jax.tree.leaves(chunk.objective.likelihood)
    # For these the Fisher of the outputs equals the Hessian of the loss, whatever the targets are.
    # A likelihood from outside need not have that property, and a subclass may have other terms.
    return all(type(x) in (Categorical, Bernoulli, Gaussian) for x in likelihoods)


def fisher_by_columns(chunk: Chunk, vector: Leaves) -> Leaves:
    r"""$J^\top S S^\top J v$, with $S$ the square root of the outputs' Fisher."""
    outputs, vjp = jax.vjp(chunk.outputs, chunk.leaves)
    pushed = [head.outputs for head in chunk.heads(_push(chunk, vector))]
    curved = [
        fisher_of_terms(head, y, count)
        for head, y, count in zip(chunk.heads(outputs), pushed, chunk.counts, strict=True)
    ]
    return vjp(chunk.objective.tree(curved))[0]


def fisher_of_terms(head: Head, vector: Array, count: Array) -> Array:
    """Multiply the Fisher of each term by a vector of outputs, and divide by ``count``."""
    return _over_count(head.fisher_product(vector), count)


def outer_products(chunk: Chunk, vector: Leaves) -> Leaves:
    r"""$\frac{1}{NR} \sum_n g_n g_n^\top v$, $g_n$ the gradient of one example's sum of terms.

    It is averaged over the samples of ``labels``. The per-example gradients are never formed: the
    Jacobian of the vector of losses is multiplied from both sides.
    """
    losses, samples = _losses_of(chunk)
    _, vjp = jax.vjp(losses, chunk.leaves)
    # J v holds g_n^T v for every example and sample, and the product of J^T with it is the sum of
    # g_n (g_n^T v).
    _, pushed = jax.jvp(losses, (chunk.leaves,), (vector,))
    return vjp(pushed / samples)[0]


def gauss_newton_form(chunk: Chunk, vectors: Leaves) -> Float[Array, "k k"]:
    r"""$v_i^\top J^\top H J v_j$ for stacked vectors, by forward passes."""
    outputs, pushed = _pushed(chunk.outputs, chunk, vectors)
    gradient = jax.grad(chunk.loss)
    # The quadratic forms need no backward pass through the model: v^T J^T H J v is an inner product
    # of outputs.
    curved = jax.vmap(lambda y: jax.jvp(gradient, (outputs,), (y,))[1])(pushed)
    return inner_products(pushed, curved)


def expected_form(chunk: Chunk, vectors: Leaves) -> Float[Array, "k k"]:
    r"""$v_i^\top J^\top H J v_j$, with $H$ the Fisher of the outputs."""
    if _is_natural(chunk):
        return gauss_newton_form(chunk, vectors)
    outputs, pushed = _pushed(chunk.outputs, chunk, vectors)
    heads = chunk.heads(outputs)

    def curved(pushed: ArrayTree) -> ArrayTree:
        along = [head.outputs for head in chunk.heads(pushed)]
        terms = zip(heads, along, chunk.counts, strict=True)
        return chunk.objective.tree([fisher_of_terms(head, y, n) for head, y, n in terms])

    return inner_products(pushed, jax.vmap(curved)(pushed))


def outer_form(chunk: Chunk, vectors: Leaves) -> Float[Array, "k k"]:
    r"""$\frac{1}{NR} \sum_n (v_i^\top g_n)(g_n^\top v_j)$, averaged over samples."""
    losses, samples = _losses_of(chunk)
    _, pushed = _pushed(losses, chunk, vectors)
    return inner_products(pushed, pushed) / samples


FORMS: Mapping[Callable[[Chunk, Leaves], Leaves], Callable[[Chunk, Leaves], Array]] = {
    gauss_newton: gauss_newton_form,
    expected_products: expected_form,
    outer_products: outer_form,
}


def _pushed(
    function: Callable[[Leaves], ArrayTree], chunk: Chunk, vectors: Leaves
) -> tuple[ArrayTree, ArrayTree]:
    """The function's value, computed once, and its derivatives along stacked vectors."""
    if any(jax.typeof(x).sharding.mesh.explicit_axes for x in vectors.values()):
        # Under vmap, jax 0.10.2 refuses a product of the model whose out_sharding has fewer entries
        # than axes, such as P().
        value, push = jax.linearize(function, chunk.leaves)
        count = len(next(iter(vectors.values())))
        several = [push({path: x[i] for path, x in vectors.items()}) for i in range(count)]
        return value, jax.tree.map(lambda *x: jnp.stack(x), *several)
    along = jax.vmap(lambda v: jax.jvp(function, (chunk.leaves,), (v,)), out_axes=(None, 0))
    return along(vectors)


def inner_products(xs: ArrayTree, ys: ArrayTree) -> Float[Array, "k k"]:
    """Inner products of stacked trees, in at least float32."""

    def product(x: Array, y: Array) -> Array:
        dtype, axes = statistics_dtype(x.dtype), tuple(range(1, x.ndim))
        mesh = jax.typeof(x).sharding.mesh
        # A sum over explicit mesh axes must state its result's sharding: replicated.
        out = NamedSharding(mesh, PartitionSpec(None, None)) if mesh.explicit_axes else None
        x, y, contracted = x.astype(dtype), y.astype(dtype), ((axes, axes), ((), ()))
        return jax.lax.dot_general(x, y, contracted, precision="highest", out_sharding=out)

    return functools.reduce(jnp.add, jax.tree.leaves(jax.tree.map(product, xs, ys)))


def _shares(chunk: Chunk, outputs: ArrayTree, targets: ArrayTree) -> Array:
    r"""Each example's sum of terms, each output's divided by its $\sqrt{T}$, ``(n,)``.

    The squares of the gradients of these sums add up to the Fisher.
    """
    sums = chunk.losses(outputs, targets, root=True)
    shares = [s / jnp.sqrt(n.astype(s.dtype)) for s, n in zip(sums, chunk.counts, strict=True)]
    return functools.reduce(jnp.add, shares)


def _losses_of(chunk: Chunk) -> tuple[Callable[[Leaves], Array], int]:
    """Each example's loss under each sample of its labels, and the number of samples."""
    labels = chunk.labels
    if labels is None:
        # Given targets are one sample of the labels.
        labels = jax.tree.map(lambda x: x[:, None], chunk.batch.targets)

    def losses(leaves: Leaves) -> Array:
        outputs = chunk.outputs(leaves)
        return jax.vmap(lambda one: _shares(chunk, outputs, one), in_axes=1)(labels)

    return losses, jax.tree.leaves(labels)[0].shape[1]


def estimated_products(chunk: Chunk, vector: Leaves) -> Leaves:
    r"""$\frac{1}{NR} \sum_n \sum_c g_{nc} g_{nc}^\top v$ over the cotangents of an estimator.

    The estimator runs on each example by itself, so that the size of chunks does not change its
    samples.
    """
    objective = chunk.objective
    outputs, vjp = jax.vjp(chunk.outputs, chunk.leaves)

    def curved(example: tuple[Batch, Estimator, ArrayTree, ArrayTree]) -> ArrayTree:
        batch, estimator, at, pushed = example
        one, at, pushed = jax.tree.map(lambda x: x[None], (batch, at, pushed))

        def contribution(cotangents: ArrayTree) -> ArrayTree:
            # An estimator scales its cotangents to the mean over the one example that it sees; here
            # they become that example's share of the batch.
            shares = objective.over_counts(cotangents, one.mask, chunk.counts)
            products = jax.tree.map(_inner, shares, pushed)
            along = functools.reduce(jnp.add, jax.tree.leaves(products))
            return jax.tree.map(lambda x: (x * along.astype(x.dtype))[0], shares)

        return estimator.expectation(objective, at, one, contribution)

    examples = (chunk.batch, chunk.labels, outputs, _push(chunk, vector))
    return vjp(jax.vmap(curved)(examples))[0]


def _inner(x: Array, y: Array) -> Array:
    dtype = statistics_dtype(x.dtype)
    return jnp.vdot(x.astype(dtype), y.astype(dtype))


def hessian_product(chunk: Chunk, vector: Leaves) -> Leaves:
    r"""$\nabla^2 L\, v$, forward over reverse."""
    gradient = jax.grad(lambda leaves: chunk.loss(chunk.outputs(leaves)))
    # Forward over reverse stores the activations once; reverse over reverse would store those of
    # the backward pass too.
    return jax.jvp(gradient, (chunk.leaves,), (vector,))[1]


def _push(chunk: Chunk, vector: Leaves) -> ArrayTree:
    return jax.jvp(chunk.outputs, (chunk.leaves,), (vector,))[1]


def _over_count(x: Float[Array, "*shape"], count: Num[Array, ""]) -> Float[Array, "*shape"]:
    """``x / count`` in the dtype of ``x``; the division is in float32, 16 bits hold no count."""
    wide = x.astype(statistics_dtype(x.dtype))
    return (wide / count.astype(wide.dtype)).astype(x.dtype)
