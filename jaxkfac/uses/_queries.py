"""Gradients of queries, preconditioned once for all training examples."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkfac._arguments import ArrayTree
from jaxkfac._errors import at_least_one, named
from jaxkfac.curvature import Eigenbases
from jaxkfac.curvature.per_example import Queries, read_many
from jaxkfac.factors import Batch, ModelCall, Objective
from jaxkfac.interception import Layer, fast_convolutions
from jaxkfac.interception.coupling import Word
from jaxkfac.kinds import LowRankMatrices
from jaxkfac.linalg import map_over_chunks
from jaxkfac.linalg.spectral import in_sequence
from jaxkfac.memory import ByteSize, MemoryBudgetError, bytes_text, parse_bytes
from jaxkfac.uses._damped_gradients import (
    BlockDamping,
    check_block_damping,
    precondition_many,
)
from jaxkfac.uses._examples import (
    Examples,
    Measurement,
    check_shows_examples,
    check_values,
)

# ---------------- low-rank matrices


_EXACT = jax.lax.Precision.HIGHEST


def truncated(
    matrices: Float[Array, "Q ..."], rank: int, *, after: Array | None = None
) -> tuple[LowRankMatrices, Float[Array, " Q"]]:
    """The nearest matrices of ``rank``, and their distances as ratios of Frobenius norms.

    The singular vectors of the shorter side are those of its Gram matrix. If rounding changes them,
    the product is still a projection, and the returned error is that of the projection.

    Args:
        matrices: ``(Q, stack..., in, out)``; there is one ratio for the whole stack.
        rank: At least 1.
        after: A result to be computed first; see :func:`jaxkfac.linalg.spectral.in_sequence`.
    """
    n_in, n_out = matrices.shape[-2:]
    if n_in > n_out:
        flipped, errors = truncated(jnp.swapaxes(matrices, -1, -2), rank, after=after)
        return LowRankMatrices(
            *(jnp.swapaxes(x, -1, -2) for x in (flipped.right, flipped.left))
        ), errors
    norms = jnp.abs(matrices).max((-2, -1), keepdims=True)
    unit = matrices / jnp.where(norms > 0, norms, 1)  # squares of small gradients are 0
    gram = jnp.einsum("...io,...jo->...ij", unit, unit, precision=_EXACT)
    left_vectors = jnp.linalg.eigh(in_sequence(gram, after))[1][..., -rank:]
    right_vectors = jnp.einsum("...ir,...io->...ro", left_vectors, matrices, precision=_EXACT)
    residual = matrices - jnp.einsum(
        "...ir,...ro->...io", left_vectors, right_vectors, precision=_EXACT
    )
    lost, norms_of_matrices = (_norms(x) for x in (residual, matrices))
    return LowRankMatrices(left_vectors, right_vectors), lost / jnp.where(
        norms_of_matrices > 0, norms_of_matrices, 1
    )


def _norms(matrices: Array) -> Float[Array, " Q"]:
    rows = matrices.reshape(len(matrices), -1)
    largest = jnp.abs(rows).max(1)
    unit = rows / jnp.where(largest > 0, largest, 1)[:, None]
    return largest * jnp.sqrt(jnp.square(unit).sum(1))


# ---------------- examples that fit into a budget


def fitting(
    batch: Batch, *, example_bytes: int, max_bytes: int, name: str, remedy: str, kept_bytes: int = 0
) -> int:
    """How many examples of a batch can be handled at once.

    Args:
        batch: The batch.
        example_bytes: Bytes of one example's gradients.
        max_bytes: The budget.
        name: What the examples are, for errors.
        remedy: An alternative to a larger budget, for errors.
        kept_bytes: Bytes that remain when all examples are done.

    Raises:
        MemoryBudgetError: not a single example fits.
        ValueError: not all examples fit, and an array of the batch does not have them first.
    """
    number = batch.num_examples
    if kept_bytes + example_bytes > max_bytes:
        beside = (
            f", and what is kept of {number} takes {bytes_text(kept_bytes)}" if kept_bytes else ""
        )
        raise MemoryBudgetError(
            f"max_bytes={max_bytes}: gradients of one example take {bytes_text(example_bytes)}"
            f"{beside}; allow that much, or {remedy}"
        )
    some = min(number, (max_bytes - kept_bytes) // max(example_bytes, 1))
    if some < number and not in_examples(batch):
        raise ValueError(
            f"{name}: gradients of {number} examples do not fit into max_bytes={max_bytes}, and "
            "an array of the batch does not have the examples first: give smaller batches"
        )
    return some


def in_examples(batch: Batch) -> bool:
    """Whether every array of a batch has the examples first, so that it can be split."""
    return all(x.shape[:1] == (batch.num_examples,) for x in jax.tree.leaves(batch))


# ---------------- preparation


_GRADIENTS = 3  # for each query in work: the gradient, its copy by layer, the preconditioned one
_AT_ONCE = 2**24  # bytes of queries in work if no budget is given


def prepare_queries(
    objective: Objective,
    params: ArrayTree,
    bases: Eigenbases,
    queries: Any,
    *,
    damping: BlockDamping = "heuristic",
    layers: str | None = None,
    query_rank: int | None = None,
    max_bytes: ByteSize | None = None,
    state: ArrayTree | None = None,
    experts: str | None = None,
    examples: Word | None = None,
    measurement: Measurement | None = None,
) -> Queries:
    r"""Precondition queries once, for many streams of examples that :func:`influence` scores.

    ``bases`` are not read afterwards: if they are large, they can be released before the examples
    are scored.

    Args:
        objective: As for :func:`influence`.
        params: Parameters.
        bases: The eigenbases.
        queries: ``(inputs, targets)`` or ``(inputs, targets, mask)``.
        damping: As for :func:`influence`.
        layers: As for :func:`influence`.
        query_rank: Store each layer's part, a matrix, as the nearest matrix of this rank, where
            that is smaller.
        max_bytes: Most bytes of queries, a number or ``"4GB"``: those stored, and those in work, as
            many at once as fit. By default there is no limit, and the queries in work take at
            most 16 MiB, or one query at a time.
        state: As for :func:`influence`.
        experts: As for :func:`influence`.
        examples: As for :func:`influence`.
        measurement: As for :func:`influence`.

    Returns:
        The queries, for ``influence(objective, params, None, queries, train)``.

    Raises:
        MemoryBudgetError: they do not fit into ``max_bytes``.
        ValueError: as for :func:`influence`; or the queries have to be handled a few at a time, and
            one of their arrays does not have the examples first.
        NonFiniteFactorError: as for :func:`influence`.
        TypeError: queries that are no tuple.

    Warns:
        UserWarning: the bases hold no curvature of the loss (``fisher="forward"``).

    Memory:
        The result, and three gradients of each query in work.

    Example:
        >>> held = jk.prepare_queries(objective, params, bases, batch, query_rank=2)
        >>> held.errors.shape == (len(inputs), len(bases)), bool((held.errors < 1).all())
        (True, True)
        >>> scores = jk.influence(objective, params, None, held, batch)
    """
    if query_rank is not None:
        at_least_one(query_rank=query_rank)
    budget = None if max_bytes is None else parse_bytes(max_bytes, name="max_bytes")
    check_shows_examples(objective)
    if not isinstance(queries, tuple):
        raise TypeError(
            "queries: expected one batch, (inputs, targets) or (inputs, targets, mask), got "
            f"{named(queries)}"
        )
    source = Examples(objective, bases, layers, experts, examples)
    check_block_damping(damping, source.bases)
    check_values(source.bases)
    batch = source.checked(params, queries, state)
    call = ModelCall(params, batch, state=state)

    if measurement is not None and not in_examples(batch):
        raise ValueError(
            "measurement: it sees one query at a time, and an array of the queries does not have "
            "the examples first"
        )
    gradients = jax.eval_shape(lambda: source.gradients(call, measurement))
    query_bytes = _GRADIENTS * _nbytes(gradients) // batch.num_examples
    if budget is None:
        at_once = max(1, _AT_ONCE // query_bytes) if in_examples(batch) else None
    else:
        at_once = fitting(
            batch,
            example_bytes=query_bytes,
            kept_bytes=_nbytes(
                jax.eval_shape(
                    lambda: _run(source, call, damping, None, query_rank, None, None)[:2]
                )
            ),
            max_bytes=budget,
            name="queries",
            remedy="choose fewer layers=" + ("" if query_rank else ", or give a query_rank="),
        )
    heuristic, number = (damping, None) if isinstance(damping, str) else (None, damping)
    run = source.compiled(_run, heuristic, query_rank, at_once, measurement)
    full_rank, low_rank, errors = run(source.bases, call, number)
    return Queries(full_rank, low_rank, errors, source.bases.layers, source.bases.origin)


def _run(
    source: Examples,
    call: ModelCall,
    damping: Any,
    heuristic: Literal["heuristic"] | None,
    rank: int | None,
    at_once: int | None,
    measurement: Measurement | None,
) -> Any:
    """The stored form of all queries, ``at_once`` in work; ``heuristic`` replaces a number."""

    def of_some(some: Batch, _: Array | None) -> Any:
        gradients = source.gradients(call._replace(batch=some), measurement)
        solved = precondition_many(
            gradients, source.bases, damping if heuristic is None else heuristic
        )
        return _stored(solved, source.bases.layers, rank)

    return map_over_chunks(of_some, call.batch, at_once, in_loop=fast_convolutions)


def _stored(
    solved: dict[str, Array], layers: tuple[Layer, ...], rank: int | None
) -> tuple[dict[str, Array], dict[str, LowRankMatrices], Float[Array, "Q layers"]]:
    """The stored form of some queries, whose axis is the first of every array."""
    low_rank: dict[str, LowRankMatrices] = {}
    last: Array | None = None  # of the decompositions
    full_rank_paths, errors = set[str](), []
    number = len(next(iter(solved.values())))
    for layer in layers:
        error = jnp.zeros(number, jnp.float32)
        if layer.bias is not None:
            full_rank_paths.add(layer.bias.path)
        if rank is None or layer.is_elementwise or not _is_smaller(layer, rank):
            full_rank_paths.add(layer.weight.path)
        else:
            matrices = read_many(solved[layer.weight.path], layer.weight, layer)
            matrices = jnp.moveaxis(matrices, len(layer.stack), 0)
            low_rank[layer.name], error = truncated(matrices, rank, after=last)
            last = error
        errors.append(error.astype(jnp.float32))
    return {path: solved[path] for path in full_rank_paths}, low_rank, jnp.stack(errors, 1)


def _is_smaller(layer: Layer, rank: int) -> bool:
    sides = layer.in_features, layer.out_features
    return rank * sum(sides) < sides[0] * sides[1]


def _nbytes(tree: ArrayTree) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
