"""Self-influence: how training on an example changes its own loss."""

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkfac._arguments import ArrayTree
from jaxkfac.curvature import Eigenbases
from jaxkfac.curvature.per_example import block_dtype
from jaxkfac.factors import Batch, ModelCall, Objective
from jaxkfac.interception import Layer, fast_convolutions
from jaxkfac.interception.coupling import Word
from jaxkfac.linalg import map_over_chunks
from jaxkfac.memory import ByteSize, parse_bytes
from jaxkfac.uses._damped_gradients import BlockDamping, check_block_damping
from jaxkfac.uses._examples import Examples, batches_of, check_values
from jaxkfac.uses._gradient_store import GradientStore
from jaxkfac.uses._queries import fitting, in_examples

GRADIENTS = 3  # alive at once for each example: the gradient, its copy by layer, the rotated one


def self_influence(
    objective: Objective,
    params: ArrayTree,
    bases: Eigenbases,
    train: Any,
    *,
    damping: BlockDamping = "heuristic",
    layers: str | None = None,
    state: ArrayTree | None = None,
    experts: str | None = None,
    max_bytes: ByteSize = 2**28,
    examples: Word | None = None,
) -> Float[Array, " N"]:
    r"""Each example's score with itself, $\nabla \ell_n^\top (F + \delta)^{-1} \nabla \ell_n$.

    It is large if the model fits an example that the other examples do not support, so examples
    with wrong labels come first. It is never negative.

    Args:
        objective: As for :func:`influence`.
        params: Parameters.
        bases: The eigenbases.
        train: ``(inputs, targets)`` or ``(inputs, targets, mask)``, or an iterable of such tuples;
            or a :func:`gradient_store` of them.
        damping: As for :func:`influence`.
        layers: As for :func:`influence`.
        state: As for :func:`influence`.
        experts: As for :func:`influence`.
        max_bytes: Most bytes at once of gradients of examples, for layers that store them, and of
            rows for all other layers, a number or ``"256MiB"``: a batch is split into as many
            examples as fit, at least one.
        examples: As for :func:`influence`.

    Returns:
        ``(N,)``, all batches in sequence.

    Raises:
        MemoryBudgetError: the gradients of one example do not fit into ``max_bytes``.
        ValueError: as for :func:`influence`; or a batch has to be split, and one of its
            arrays does not have the examples first.

    Warns:
        UserWarning: the bases hold no curvature of the loss (``fisher="forward"``).

    Memory:
        A layer that an example passes once, and whose parameters no other layer reads, takes its
        damped inverse eigenvalues, as large as its weight, and 32 MiB or the gradient of one
        example. All other layers take three gradients of as many examples as fit into
        ``max_bytes``.

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
    scorer = Examples(objective, bases, layers, experts, examples)
    check_block_damping(damping, scorer.bases)
    check_values(scorer.bases)

    heuristic, number = (damping, None) if isinstance(damping, str) else (None, damping)

    def at_once(call: ModelCall) -> int:
        batch, stored_layers = call.batch, scorer.own_gradients(call)
        dtypes = [block_dtype(scorer.bases, layer) for layer in stored_layers]
        example_bytes = GRADIENTS * sum(
            layer.num_parameters * dtype.itemsize
            for layer, dtype in zip(stored_layers, dtypes, strict=True)
        )
        some = fitting(
            batch,
            example_bytes=example_bytes,
            max_bytes=budget,
            name="train",
            remedy="choose fewer layers=",
        )
        if not in_examples(batch):
            return some
        beside = sum(
            min(GRADIENTS * layer.num_parameters, _rows_up_to(layer, batch))
            * block_dtype(scorer.bases, layer).itemsize
            for layer in scorer.layers
            if layer not in stored_layers
        )
        return max(1, min(some, budget // max(example_bytes + beside, 1)))

    by_batch = []
    for some in batches_of(train):
        call = ModelCall(params, scorer.checked(params, some, state), state=state)
        scores = scorer.compiled(_products, heuristic, at_once(call))
        by_batch.append(scores(scorer.bases, call, number))
    return jnp.concatenate(by_batch)


def _products(
    scorer: Examples,
    call: ModelCall,
    damping: Any,
    heuristic: Literal["heuristic"] | None,
    at_once: int,
) -> Float[Array, " N"]:
    """The scores of one batch, ``at_once`` examples at a time; see ``_queries._run``."""

    def of_some(some: Batch, _: Array | None) -> Array:
        delta = damping if heuristic is None else heuristic
        return scorer.own_products(scorer.bases, call._replace(batch=some), delta)

    return map_over_chunks(of_some, call.batch, at_once, in_loop=fast_convolutions)


def _rows_up_to(layer: Layer, batch: Batch) -> int:
    """Most elements of an example's rows in a layer; an example's size bounds its positions."""
    leaves = jax.tree.leaves((batch.inputs, batch.targets))
    positions = max(leaf.size // batch.num_examples for leaf in leaves)
    sides = layer.in_features + layer.out_features
    return math.prod(layer.stack) * positions * sides
