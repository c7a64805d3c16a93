"""Gradients of queries, preconditioned once for all examples."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from jaxkfac._errors import at_least_one, named
from jaxkfac.curvature import (
    BlockDamping,
    Eigenbases,
    check_block_damping,
    precondition_many,
    read_many,
)
from jaxkfac.factors import Batch, Objective
from jaxkfac.interception import Layer, Word, fast_convolutions
from jaxkfac.kinds import LowRankMatrices
from jaxkfac.linalg import in_sequence, map_over_chunks
from jaxkfac.memory import ByteSize, MemoryBudgetError, bytes_text, parse_bytes
from jaxkfac.uses._example_gradients import Queries
from jaxkfac.uses._examples import Examples, Measurement

# ---------------- the nearest matrix of a low rank, as two factors


_EXACT = jax.lax.Precision.HIGHEST


def truncated(
    matrices: Float[Array, "Q ..."], rank: int, *, after: Array | None = None
) -> tuple[LowRankMatrices, Float[Array, " Q"]]:
    """The nearest matrices of ``rank``, and how far they are, as ratios of Frobenius norms.

    The singular vectors of the shorter side are those of its Gram matrix. Where rounding tells
    them from the nearest ones, the product is still a projection, and the error that of it.

    Args:
        matrices: ``(Q, stack..., in, out)``; one ratio for all of a stack.
        rank: At least 1.
        after: A result that goes before, see :func:`jaxkfac.linalg.in_sequence`.
    """
    n_in, n_out = matrices.shape[-2:]
    if n_in > n_out:
        other, errors = truncated(jnp.swapaxes(matrices, -1, -2), rank, after=after)
        return LowRankMatrices(
            *(jnp.swapaxes(x, -1, -2) for x in (other.right, other.left))
        ), errors
    norms = jnp.abs(matrices).max((-2, -1), keepdims=True)
    unit = matrices / jnp.where(norms > 0, norms, 1)  # squares of small gradients are 0
    gram = jnp.einsum("...io,...jo->...ij", unit, unit, precision=_EXACT)
    left = jnp.linalg.eigh(in_sequence(gram, after))[1][..., -rank:]
    right = jnp.einsum("...ir,...io->...ro", left, matrices, precision=_EXACT)
    rest = matrices - jnp.einsum("...ir,...ro->...io", left, right, precision=_EXACT)
    lost, whole = (_norms(x) for x in (rest, matrices))
    return LowRankMatrices(left, right), lost / jnp.where(whole > 0, whole, 1)


def _norms(matrices: Array) -> Float[Array, " Q"]:
    rows = matrices.reshape(len(matrices), -1)
    largest = jnp.abs(rows).max(1)
    unit = rows / jnp.where(largest > 0, largest, 1)[:, None]
    return largest * jnp.sqrt(jnp.square(unit).sum(1))


# ---------------- how many gradients of examples fit into a budget of bytes


def fitting(
    batch: Batch, *, each: int, max_bytes: int, name: str, remedy: str, kept: int = 0
) -> int:
    """How many examples of a batch can be taken at once.

    Args:
        batch: The batch.
        each: Bytes of one example's gradients.
        max_bytes: The budget.
        name: What the examples are, for errors.
        remedy: What else to do than to allow more.
        kept: Bytes that stay when all are done.

    Raises:
        MemoryBudgetError: not one.
        ValueError: not all, and an array of the batch does not have the examples first.
    """
    number = batch.num_examples
    if kept + each > max_bytes:
        beside = f", and what is kept of {number} takes {bytes_text(kept)}" if kept else ""
        raise MemoryBudgetError(
            f"max_bytes={max_bytes}: gradients of one example take {bytes_text(each)}{beside}; "
            f"allow that much, or {remedy}"
        )
    some = min(number, (max_bytes - kept) // max(each, 1))
    if some < number and not in_examples(batch):
        raise ValueError(
            f"{name}: gradients of {number} examples do not fit into max_bytes={max_bytes}, and "
            "an array of the batch does not have the examples first: give smaller batches"
        )
    return some


def in_examples(batch: Batch) -> bool:
    """Whether every array of a batch has the examples first, so that it can be cut into them."""
    return all(x.shape[:1] == (batch.num_examples,) for x in jax.tree.leaves(batch))


# ----------------


_GRADIENTS = 3  # of each query in work: its own, the same by layer, the preconditioned
_AT_ONCE = 2**24  # bytes of them, where no budget was given


def prepare_queries(
    objective: Objective,
    params: PyTree,
    bases: Eigenbases,
    queries: Any,
    *,
    damping: BlockDamping = "heuristic",
    layers: str | None = None,
    query_rank: int | None = None,
    max_bytes: ByteSize | None = None,
    state: PyTree | None = None,
    experts: str | None = None,
    examples: Word | None = None,
    measurement: Measurement | None = None,
) -> Queries:
    r"""What :func:`influence` holds of its queries, for many streams of examples.

    Nothing of ``bases`` is read after it: where they are large, they can be given up before the
    examples are scored.

    Args:
        objective: As for :func:`influence`, like all that is not named here.
        params: Parameters.
        bases: The eigenbases.
        queries: ``(inputs, targets)`` or ``(inputs, targets, mask)``.
        damping: As for :func:`influence`.
        layers: Likewise.
        query_rank: Hold each layer's part, a matrix, as the nearest one of this rank, where that
            is smaller.
        max_bytes: What queries may take, a number or ``"4GB"``: those that are held, and those in
            work, as many at once as fit. By default there is no bound, and as many are in work as
            16 MiB hold, at least one.
        state: Likewise.
        experts: Likewise.
        examples: Likewise.
        measurement: Likewise.

    Returns:
        The queries, for ``influence(objective, params, None, queries, train)``.

    Raises:
        MemoryBudgetError: they do not fit into ``max_bytes``.
        ValueError: as for :func:`influence`; or the queries have to be taken a few at a time, and
            one of their arrays does not have the examples first.
        TypeError: queries that are no tuple.

    Warns:
        UserWarning: the bases hold no curvature of the loss (``fisher="forward"``).

    Memory:
        The result, and three gradients of each query that is in work.

    Example:
        >>> held = jk.prepare_queries(objective, params, bases, batch, query_rank=2)
        >>> held.errors.shape == (len(inputs), len(bases)), bool((held.errors < 1).all())
        (True, True)
        >>> scores = jk.influence(objective, params, None, held, batch)
    """
    if query_rank is not None:
        at_least_one(query_rank=query_rank)
    budget = None if max_bytes is None else parse_bytes(max_bytes, name="max_bytes")
    if not isinstance(queries, tuple):
        raise TypeError(
            "queries: expected one batch, (inputs, targets) or (inputs, targets, mask), got "
            f"{named(queries)}"
        )
    own = Examples(objective, bases, layers, experts, examples)
    check_block_damping(damping, own.bases)
    batch = own.checked(params, queries, state)

    if measurement is not None and not in_examples(batch):
        raise ValueError(
            "measurement: it sees one query at a time, and an array of the queries does not have "
            "the examples first"
        )
    gradients = jax.eval_shape(lambda: own.gradients(params, batch, state, measurement))
    each = _GRADIENTS * _nbytes(gradients) // batch.num_examples
    if budget is None:
        at_once = max(1, _AT_ONCE // each) if in_examples(batch) else None
    else:
        at_once = fitting(
            batch,
            each=each,
            kept=_nbytes(
                jax.eval_shape(
                    lambda: _run(own, params, batch, state, damping, None, query_rank, None, None)[
                        :2
                    ]
                )
            ),
            max_bytes=budget,
            name="queries",
            remedy="choose fewer layers=" + ("" if query_rank else ", or give a query_rank="),
        )
    word, number = (damping, None) if isinstance(damping, str) else (None, damping)
    run = own.compiled(_run, word, query_rank, at_once, measurement)
    whole, low_rank, errors = run(params, own.bases, batch, state, number)
    return Queries(whole, low_rank, errors, own.bases.layers, own.bases.origin)


def _run(
    own: Examples,
    params: PyTree,
    batch: Batch,
    state: PyTree,
    damping: Any,
    word: Literal["heuristic"] | None,
    rank: int | None,
    at_once: int | None,
    measurement: Measurement | None,
) -> Any:
    """What is held of all queries, ``at_once`` in work; ``word`` is a damping that is no number."""

    def of_some(some: Batch, _: Any) -> Any:
        gradients = own.gradients(params, some, state, measurement)
        solved = precondition_many(gradients, own.bases, damping if word is None else word)
        return _held(solved, own.bases.layers, rank)

    return map_over_chunks(of_some, batch, at_once, in_loop=fast_convolutions)


def _held(
    solved: dict[str, Array], layers: tuple[Layer, ...], rank: int | None
) -> tuple[dict[str, Array], dict[str, LowRankMatrices], Float[Array, "Q layers"]]:
    """What is held of some queries, which lie first in every array."""
    low_rank: dict[str, LowRankMatrices] = {}
    last: Array | None = None  # of the decompositions
    whole, errors = set[str](), []
    number = len(next(iter(solved.values())))
    for layer in layers:
        error = jnp.zeros(number, jnp.float32)
        if layer.bias is not None:
            whole.add(layer.bias.path)
        if rank is None or layer.is_elementwise or not _is_smaller(layer, rank):
            whole.add(layer.weight.path)
        else:
            matrices = read_many(solved[layer.weight.path], layer.weight, layer)
            matrices = jnp.moveaxis(matrices, len(layer.stack), 0)
            low_rank[layer.name], error = truncated(matrices, rank, after=last)
            last = error
        errors.append(error.astype(jnp.float32))
    return {path: solved[path] for path in whole}, low_rank, jnp.stack(errors, 1)


def _is_smaller(layer: Layer, rank: int) -> bool:
    sides = layer.in_features, layer.out_features
    return rank * sum(sides) < sides[0] * sides[1]


def _nbytes(tree: PyTree) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
