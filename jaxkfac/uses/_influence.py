"""Influence functions: what training on an example does to the loss of another."""

import functools
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from jaxkfac._checks import at_least_one, one_of
from jaxkfac.curvature import BlockDamping, Eigenbases, check_block_damping, precondition_many
from jaxkfac.factors import Objective
from jaxkfac.uses._batches import batches_of
from jaxkfac.uses._examples import Examples, Per
from jaxkfac.uses._top_k import TopK, joined, none_yet


def influence(
    objective: Objective,
    params: PyTree,
    bases: Eigenbases,
    queries: Any,
    train: Any,
    *,
    damping: BlockDamping = "heuristic",
    layers: str | None = None,
    per: Per = "sum",
    top_k: int | None = None,
    state: PyTree | None = None,
    experts: str | None = None,
) -> Float[Array, "..."] | TopK:
    r"""How much training on each example lowers the loss of each query.

    With $\nabla \ell_n$ the gradient of the sum over one example's loss terms and $F$ the Fisher
    that the bases stand for, the score of query $q$ and training example $t$ is

    $$ s_{qt} = \nabla \ell_q^\top (F + \delta)^{-1} \nabla \ell_t . $$

    Positive means that training on $t$ lowers the loss of $q$: where $F$ is the Hessian of the
    mean loss, the derivative of $\ell_q$ in the weight of $t$ is $-s_{qt} / N$. It is a
    derivative, not what leaving $t$ out does: on a linear model that is $1 / (1 - h_t)$ as
    much, $h_t$ the leverage.

    The queries' gradients are preconditioned once and kept. Training examples are streamed: each
    batch takes one backward pass for all queries, in which layers multiply the queries with what
    they see of an example, and no gradient of the whole model is formed.

    Args:
        objective: A model and its likelihood.
        params: Parameters.
        bases: From :func:`eigendecompose`, or with eigenvalues measured by
            :func:`correct_eigenvalues`. Parameters that they do not cover count as fixed.
        queries: ``(inputs, targets)`` or ``(inputs, targets, mask)``; masked terms count nowhere.
        train: Such a tuple, or an iterable of them, read once.
        damping: $\delta \ge 0$ in the units of the squared gradient, or ``"heuristic"``: for each
            block, and each slice of a stack, a tenth of its mean eigenvalue.
        layers: A pattern of layer names or parameter paths, matched whole; ``None`` takes all
            layers of the bases.
        per: ``"sum"``; ``"layer"``: scores of each layer, in the order of ``bases.layers`` (of
            those that ``layers`` matches), a stack as one; ``"token"``: of each position of the
            training examples, for outputs ``(N, S, ...)``.
        top_k: Keep only so many of the largest scores of each query (and layer) while streaming.
            Examples whose terms are all masked are left out.
        state: What a call of the model takes beside its inputs (batch statistics).
        experts: As it was given for the factors.

    Returns:
        ``(Q, N)``, with ``per="layer"`` ``(Q, layers, N)``, with ``"token"`` ``(Q, N, S)``; with
        ``top_k`` a ``TopK(scores, indices)``.

    Raises:
        CoupledExamplesError: an example's output depends on other examples, as by batch
            statistics outside of evaluation mode.
        UnknownLayerError: ``layers`` matches nothing, or the program lacks a layer of the bases.
        LostRowsError: the rows of a layer cannot be told apart by example, or by position.
        ValueError: bases of another model or without vectors, a batch that does not fit, an
            iterable that is empty, or zero damping of a block that is singular.
        TypeError: a scalar loss in place of an ``Objective``.

    Warns:
        UserWarning: every G is the identity, so that the bases hold no curvature of the loss.

    Memory:
        Three gradients of each query, one backward pass of a batch without gradients of
        parameters, and for each layer 32 MiB or what one example takes. Scales and lone biases
        keep their gradients by example, with ``per="token"`` by position.

    Example:
        >>> scores = jk.influence(objective, params, bases, (inputs[:2], targets[:2]), batch)
        >>> scores.shape == (2, len(inputs)), bool(scores[0, 0] > 0)
        (True, True)
        >>> best = jk.influence(objective, params, bases, batch, iter([batch, batch]), top_k=3)
        >>> best.indices.shape == (len(inputs), 3)
        True

    References:
        Roger Grosse et al., "Studying Large Language Model Generalization with Influence
        Functions", 2023.
    """
    one_of("per", per, get_args(Per))
    if top_k is not None:
        at_least_one(top_k=top_k)
        if per == "token":
            raise ValueError("top_k ranks examples, and per='token' scores their positions")
    examples = Examples(objective, bases, layers, experts)
    check_block_damping(damping, examples.bases)
    batch = examples.checked(params, queries, state)
    solved = _preconditioned(examples, params, batch, state, damping)
    score = jax.jit(functools.partial(examples.scores, per=per))
    found, best, start = [], None, 0
    for some in batches_of(train):
        batch = examples.checked(params, some, state)
        scores = score(params, solved, batch, state)
        if top_k is None:
            found.append(scores)
        else:
            before = none_yet(scores.shape[:-1], top_k, scores.dtype) if best is None else best
            best = joined(before, scores, examples.exists(batch), start)
        start += batch.num_examples
    return jnp.concatenate(found, 1 + (per == "layer")) if best is None else best


def _preconditioned(
    examples: Examples, params: PyTree, batch: Any, state: PyTree, damping: BlockDamping
) -> dict[str, Array]:
    @jax.jit
    def run(params: PyTree, bases: Eigenbases, batch: Any, state: PyTree) -> dict[str, Array]:
        return precondition_many(examples.gradients(params, batch, state), bases, damping)

    return run(params, examples.bases, batch, state)
