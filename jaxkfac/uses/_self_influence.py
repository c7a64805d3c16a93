"""Self-influence: what training on an example does to its own loss."""

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from jaxkfac.curvature import BlockDamping, Eigenbases, check_block_damping
from jaxkfac.factors import Batch, Objective
from jaxkfac.interception import Layer, Word, fast_convolutions
from jaxkfac.linalg import map_over_chunks
from jaxkfac.memory import ByteSize, parse_bytes
from jaxkfac.uses._example_gradients import block_dtype
from jaxkfac.uses._examples import Examples, batches_of
from jaxkfac.uses._gradient_store import GradientStore
from jaxkfac.uses._queries import fitting, in_examples

GRADIENTS = 3  # of each example alive at once: its own, the same by layer, the rotated


def self_influence(
    objective: Objective,
    params: PyTree,
    bases: Eigenbases,
    train: Any,
    *,
    damping: BlockDamping = "heuristic",
    layers: str | None = None,
    state: PyTree | None = None,
    experts: str | None = None,
    max_bytes: ByteSize = 2**28,
    examples: Word | None = None,
) -> Float[Array, " N"]:
    r"""Each example's score with itself, $\nabla \ell_n^\top (F + \delta)^{-1} \nabla \ell_n$.

    It is large where the model fits an example that the others do not support: examples with a
    wrong label come first. It is never negative.

    Args:
        objective: As for :func:`influence`, like all that is not named here.
        params: Parameters.
        bases: The eigenbases.
        train: ``(inputs, targets)`` or ``(inputs, targets, mask)``, or an iterable of such tuples;
            or what :func:`gradient_store` has made of them.
        damping: As for :func:`influence`.
        layers: Likewise.
        state: Likewise.
        experts: Likewise.
        max_bytes: What gradients of examples may take at once where they are held, and elsewhere
            the rows of layers, a number or ``"256MiB"``: a batch is cut into as many examples as
            fit, at least one.
        examples: As for :func:`influence`.

    Returns:
        ``(N,)``, all batches one after the other.

    Raises:
        MemoryBudgetError: the gradients of one example do not fit into ``max_bytes``.
        ValueError: as for :func:`influence`; or a batch has to be cut into parts, and one of its
            arrays does not have the examples first.

    Warns:
        UserWarning: the bases hold no curvature of the loss (``fisher="forward"``).

    Memory:
        A layer that an example passes once, and whose parameters no other layer reads, takes its
        damped inverse eigenvalues, as large as its weight, and 32 MiB or the gradient of one
        example. Of the others three gradients of as many examples as fit into ``max_bytes``.

    Example:
        >>> own = jk.self_influence(objective, params, bases, batch)
        >>> scores = jk.influence(objective, params, bases, batch, batch)
        >>> bool(jnp.allclose(own, jnp.diagonal(scores), rtol=1e-3))
        True
    """
    budget = parse_bytes(max_bytes, name="max_bytes")
    if isinstance(train, GradientStore):
        train.check(objective, params, bases, state)
        return train.own_products(bases, damping, layers)
    own = Examples(objective, bases, layers, experts, examples)
    check_block_damping(damping, own.bases)

    word, number = (damping, None) if isinstance(damping, str) else (None, damping)

    def at_once(params: PyTree, batch: Batch, state: PyTree) -> int:
        held = own.own_gradients(params, batch, state)
        dtypes = [block_dtype(own.bases, layer) for layer in held]
        each = GRADIENTS * sum(
            layer.num_parameters * dtype.itemsize for layer, dtype in zip(held, dtypes, strict=True)
        )
        some = fitting(
            batch, each=each, max_bytes=budget, name="train", remedy="choose fewer layers="
        )
        if not in_examples(batch):
            return some
        beside = sum(
            min(GRADIENTS * layer.num_parameters, _rows_up_to(layer, batch))
            * block_dtype(own.bases, layer).itemsize
            for layer in own.layers
            if layer not in held
        )
        return max(1, min(some, budget // max(each + beside, 1)))

    found = []
    for some in batches_of(train):
        batch = own.checked(params, some, state)
        scores = own.compiled(_products, word, at_once(params, batch, state))
        found.append(scores(params, own.bases, batch, state, number))
    return jnp.concatenate(found)


def _products(
    own: Examples,
    params: PyTree,
    batch: Batch,
    state: PyTree,
    damping: Any,
    word: Literal["heuristic"] | None,
    at_once: int,
) -> Float[Array, " N"]:
    """Of one batch, so many examples at once; ``word`` is a damping that is no number."""

    def of_some(some: Batch, _: Any) -> Array:
        delta = damping if word is None else word
        return own.own_products(params, own.bases, some, state, delta)

    return map_over_chunks(of_some, batch, at_once, in_loop=fast_convolutions)


def _rows_up_to(layer: Layer, batch: Batch) -> int:
    """Elements of an example's rows in a layer; positions are at most its numbers, in or out."""
    leaves = jax.tree.leaves((batch.inputs, batch.targets))
    positions = max(leaf.size // batch.num_examples for leaf in leaves)
    sides = layer.in_features + layer.out_features
    return math.prod(layer.stack) * positions * sides
