"""Influence functions: how training on one example changes the loss of another."""

import operator
import warnings
from collections.abc import Iterator
from html import escape
from typing import Any, NamedTuple, TypedDict, Unpack, get_args, overload

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from jaxkfac._arguments import ArrayTree
from jaxkfac._errors import at_least_one, one_of, scalar
from jaxkfac._text import ruled, short_repr, table_html
from jaxkfac.curvature import Eigenbases
from jaxkfac.curvature.per_example import Queries
from jaxkfac.factors import ModelCall, Objective
from jaxkfac.interception.coupling import Word
from jaxkfac.memory import ByteSize
from jaxkfac.uses._damped_gradients import BlockDamping
from jaxkfac.uses._examples import Examples, Measurement, Per, batches_of, chosen
from jaxkfac.uses._gradient_store import GradientStore
from jaxkfac.uses._queries import prepare_queries

# ---------------- the largest scores


_SHOWN = 20  # queries that are shown
_COLUMNS = 5  # scores of a query that a terminal shows


class TopK(NamedTuple):
    """The largest scores of each query, the largest first.

    Attributes:
        scores: ``(Q, k)``, or ``(Q, layers, k)`` with ``per="layer"``; ``-inf`` if fewer than ``k``
            examples have a score that is a number.
        indices: Places of these examples in the stream, from 0, in the same shape; ``-1`` if there
            is no example.
    """

    scores: Float[Array, "*queries k"]
    indices: Int[Array, "*queries k"]

    __repr__ = short_repr

    def __str__(self) -> str:
        if self._has_no_table:
            return repr(self)
        head, rows, notes = self._table(_COLUMNS)
        return "\n".join([*ruled(head, rows), *notes])

    def _repr_html_(self) -> str:
        if self._has_no_table:
            return escape(repr(self))
        head, rows, notes = self._table(self.scores.shape[-1])
        return table_html(repr(self), head, rows, notes=notes)

    @property
    def _has_no_table(self) -> bool:
        return self.scores.ndim < 2 or isinstance(self.scores, Tracer)

    def _table(self, most: int) -> tuple[list[str], list[list[str]], list[str]]:
        """Head, rows and notes of a table of the first queries and at most ``most`` of their
        scores.
        """
        k = self.scores.shape[-1]
        arrays = [x.reshape(-1, k)[:_SHOWN, :most] for x in jax.device_get(self)]
        rows = [
            [str(i), *(f"{index}: {score:.3g}" if index >= 0 else "" for score, index in line)]
            for i, line in enumerate(zip(s, n) for s, n in zip(*arrays))
        ]
        head = ["query", *(f"{rank}." for rank in range(1, min(k, most) + 1))]
        notes = ["place in the stream: score"]
        if (more := self.scores.size // max(k, 1) - len(rows)) > 0:
            notes.append(f"and {more} more queries")
        return head, rows, notes


def none_yet(shape: tuple[int, ...], k: int, dtype: jnp.dtype) -> TopK:
    """The result before any example is read."""
    return TopK(jnp.full((*shape, k), -jnp.inf, dtype), jnp.full((*shape, k), -1, jnp.int32))


def check_top_k(best: TopK, shape: tuple[int, ...]) -> None:
    """Refuse a ``TopK`` of other queries, or of scores with another ``per``.

    Raises:
        ValueError: naming both shapes.
    """
    if best.scores.shape[:-1] != shape:
        raise ValueError(
            f"top_k: expected a TopK of scores {(*shape, 'k')}, got {best.scores.shape}: go on "
            "with the queries, layers= and per= of the first part"
        )


def count_nan(scores: Float[Array, "*queries n"], exists: Bool[Array, " n"]) -> Int[Array, ""]:
    """Number of examples with a score that is NaN."""
    bad = jnp.isnan(scores).reshape(-1, len(exists)).any(0)
    return (bad & exists).sum()


def joined(
    best: TopK, scores: Float[Array, "*queries n"], exists: Bool[Array, " n"], start: int
) -> TopK:
    """The best scores of those so far and of one batch, whose first example is number ``start``.

    Scores that are NaN do not count, because ``top_k`` would rank them above all numbers.
    """
    counts = exists & ~jnp.isnan(scores)
    places = jnp.where(counts, start + jnp.arange(len(exists), dtype=jnp.int32), -1)
    every = jnp.concatenate([best.scores, jnp.where(counts, scores, -jnp.inf)], -1)
    indices = jnp.concatenate([best.indices, places], -1)
    values, at = jax.lax.top_k(every, best.scores.shape[-1])
    return TopK(values, jnp.take_along_axis(indices, at, -1))


# ---------------- influence


class TruncatedScores(NamedTuple):
    """Scores of queries that were stored at low rank.

    Attributes:
        scores: As with queries at full rank.
        errors: ``(Q, layers)``: what was lost of each layer's part of a preconditioned query, as a
            ratio of Frobenius norms; 0 for a layer at full rank.
    """

    scores: Float[Array, "..."] | TopK
    errors: Float[Array, "Q layers"]


class InfluenceOptions(TypedDict, total=False):
    """Options of :func:`influence` that do not change what it returns."""

    damping: BlockDamping
    layers: str | None
    per: Per
    start: int | None
    max_bytes: ByteSize | None
    state: ArrayTree | None
    experts: str | None
    examples: Word | None
    measurement: Measurement | None


@overload
def influence(
    objective: Objective,
    params: ArrayTree,
    bases: Eigenbases | None,
    queries: Any,
    train: Any,
    *,
    top_k: None = ...,
    query_rank: None = ...,
    **options: Unpack[InfluenceOptions],
) -> Float[Array, "..."]: ...
@overload
def influence(
    objective: Objective,
    params: ArrayTree,
    bases: Eigenbases | None,
    queries: Any,
    train: Any,
    *,
    top_k: int | TopK,
    query_rank: None = ...,
    **options: Unpack[InfluenceOptions],
) -> TopK: ...
# Prepared queries keep the rank of their preparation, so the result has no errors of its own.
@overload
def influence(
    objective: Objective,
    params: ArrayTree,
    bases: Eigenbases | None,
    queries: Queries,
    train: Any,
    *,
    top_k: int | TopK | None = ...,
    query_rank: int,
    **options: Unpack[InfluenceOptions],
) -> Float[Array, "..."] | TopK: ...
@overload
def influence(
    objective: Objective,
    params: ArrayTree,
    bases: Eigenbases | None,
    queries: Any,
    train: Any,
    *,
    top_k: int | TopK | None = ...,
    query_rank: int,
    **options: Unpack[InfluenceOptions],
) -> TruncatedScores: ...
def influence(
    objective: Objective,
    params: ArrayTree,
    bases: Eigenbases | None,
    queries: Any,
    train: Any,
    *,
    damping: BlockDamping = "heuristic",
    layers: str | None = None,
    per: Per = "sum",
    top_k: int | TopK | None = None,
    start: int | None = None,
    query_rank: int | None = None,
    max_bytes: ByteSize | None = None,
    state: ArrayTree | None = None,
    experts: str | None = None,
    examples: Word | None = None,
    measurement: Measurement | None = None,
) -> Float[Array, "..."] | TopK | TruncatedScores:
    r"""Score how much training on each example lowers the loss of each query.

    With $\nabla \ell_n$ the gradient of the sum of one example's loss terms and $F$ the Fisher
    that the bases represent, the score of query $q$ and training example $t$ is

    $$ s_{qt} = \nabla \ell_q^\top (F + \delta)^{-1} \nabla \ell_t . $$

    Positive means that training on $t$ lowers the loss of $q$. If $F$ is the Hessian of the
    mean loss, the derivative of $\ell_q$ in the weight of $t$ is $-s_{qt} / N$. It is a
    derivative, not the effect of leaving $t$ out; on a linear model that effect is
    $1 / (1 - h_t)$ times as large, with $h_t$ the leverage.

    The queries' gradients are preconditioned once and stored. Training examples are streamed: each
    batch takes one backward pass for all queries. In it, each layer multiplies the queries with its
    part of an example's gradient, and no gradient of the full model is formed.

    Args:
        objective: A model and its likelihood.
        params: Parameters.
        bases: From :func:`eigendecompose`, or with eigenvalues measured by
            :func:`correct_eigenvalues`. Parameters that they do not cover count as fixed.
            ``None`` if the queries were prepared with them.
        queries: ``(inputs, targets)`` or ``(inputs, targets, mask)``; masked terms do not count.
            Or the result of :func:`prepare_queries`; then ``damping``, ``query_rank`` and
            ``max_bytes`` are not used.
        train: Such a tuple, or an iterable of them, read once. Or a :func:`gradient_store` of
            them, which takes no backward pass; then ``experts`` and ``examples`` are not used.
        damping: $\delta \ge 0$, added to the curvature of the mean loss, in units of its squared
            gradient; or ``"heuristic"``: a tenth of the mean eigenvalue of each block, and of each
            slice of a stack.
        layers: A full-match pattern of layer names or parameter paths; ``None`` takes all
            layers of the bases.
        per: ``"sum"``; ``"layer"``: scores of each layer, in the order of ``bases.layers`` (those
            that ``layers`` matches), a stack counting as one; ``"token"``: scores of each position
            of the training examples, for outputs ``(N, S, ...)``.
        top_k: Keep only this many of the largest scores of each query (and layer) while streaming.
            Examples whose terms are all masked, and scores that are NaN, are left out. Pass a
            ``TopK`` of an earlier part of the stream to continue it, with ``start``.
        start: Place in the stream of the first example; 0 by default, required if
            ``top_k`` is a ``TopK``.
        query_rank: Store each layer's part of a query, a matrix, as the nearest matrix of this
            rank, where that is smaller. Scoring is then faster.
        max_bytes: Most bytes of queries, both stored and in work, a number or
            ``"4GB"``; unlimited by default.
        state: What a call of the model takes besides its inputs (batch statistics).
        experts: As for the factors.
        examples: ``"apart"`` declares that no example's output depends on another example, where
            the program does not prove it; see :func:`value_grad_and_factors`.
        measurement: ``measurement(outputs, query)``, a scalar of one query that replaces its loss:
            for example a margin, or the log likelihood of some tokens. It receives the outputs and
            the batch ``(inputs, targets, mask)`` of that query without the example axis, and
            $\nabla \ell_q$ is its gradient. Positive scores then mean that training on an example
            lowers the measurement. Pass the same function each time, or each call compiles.

    Returns:
        ``(Q, N)``; with ``per="layer"`` ``(Q, layers, N)``; with ``"token"`` ``(Q, N, S)``, where S
        is the longest of all batches and shorter ones end in zeros. With ``top_k`` a
        ``TopK(scores, indices)``. With ``query_rank``, ``TruncatedScores(scores, errors)``,
        where ``scores`` is one of these.

    Raises:
        MemoryBudgetError: the queries do not fit into ``max_bytes``.
        CoupledExamplesError: an example's output depends on other examples, for example through
            batch statistics outside of evaluation mode.
        UnknownLayerError: ``layers`` matches nothing, or the program lacks a layer of the bases.
        LostRowsError: the rows of a layer cannot be assigned to examples, or to positions.
        NonFiniteFactorError: an eigenvalue of the bases is not finite; the layer is named.
        ValueError: bases of another model, of another likelihood (if ``bases.origin`` shows it),
            without vectors, or of factors that are all zero; a batch that does not fit; an iterable
            that is empty; zero damping of a singular block; ``layers`` that leave out another
            reading of the same elements of a parameter; a ``TopK`` of other queries or without
            ``start``; or a measurement that
            is not a floating scalar, or is passed with prepared queries.
        TypeError: a scalar loss in place of an ``Objective``, or queries that are no tuple.

    Warns:
        UserWarning: the bases hold no curvature of the loss (``fisher="forward"``); or ``top_k``
            leaves out examples whose scores are NaN (not under ``jit``).

    Memory:
        One gradient of each query (less with ``query_rank``), three more for those in work, one
        backward pass of a batch without gradients of parameters, and for each layer 32 MiB or
        what one example takes. Scales and lone biases store their gradients by example, or
        by position with ``per="token"``.

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
        if not isinstance(top_k, TopK):
            at_least_one(top_k=top_k)
        if per == "token":
            raise ValueError("top_k ranks examples, and per='token' scores their positions")
        if isinstance(top_k, TopK) and start is None:
            raise ValueError(
                "top_k is a TopK, of an earlier part of the stream: pass start=, the number of "
                "examples in it, or indices would begin again at 0"
            )
    if start is not None and not isinstance(start, Tracer):
        scalar("start", start, "a whole number of examples")
        if start < 0 or start != int(start):
            raise ValueError(f"start={start}: expected a whole number of examples, or 0")
        start = int(start)
    if isinstance(train, GradientStore):
        train.check(objective, params, bases, state)
    prepared_queries, prepared = queries, isinstance(queries, Queries)
    if prepared and measurement is not None:
        raise ValueError("measurement: the queries are prepared: pass it to jk.prepare_queries")
    if not prepared:
        if bases is None:
            raise TypeError(
                "bases: expected Eigenbases; only queries of jk.prepare_queries need none"
            )
        prepared_queries = prepare_queries(
            objective,
            params,
            bases,
            queries,
            damping=damping,
            layers=layers,
            query_rank=query_rank,
            max_bytes=max_bytes,
            state=state,
            experts=experts,
            examples=examples,
            measurement=measurement,
        )
    by_batch, best, start, bad = [], None, start or 0, []
    if isinstance(top_k, TopK):
        number = len(chosen(prepared_queries, layers).layers)
        check_top_k(
            top_k,
            (prepared_queries.number, number) if per == "layer" else (prepared_queries.number,),
        )
        best = top_k
    options = {"per": per, "layers": layers, "state": state, "experts": experts}
    options["examples"] = examples
    for scores, exist in scores_of_batches(objective, params, prepared_queries, train, **options):
        if top_k is None:
            by_batch.append(scores)
            continue
        if best is None:
            assert not isinstance(top_k, TopK)
            best = none_yet(scores.shape[:-1], operator.index(top_k), scores.dtype)
        best = joined(best, scores, exist, start)
        start += len(exist)
        bad.append(count_nan(scores, exist))
    _warn_of_nan(bad)
    if per == "token":
        longest = max(x.shape[-1] for x in by_batch)
        by_batch = [jnp.pad(x, ((0, 0), (0, 0), (0, longest - x.shape[-1]))) for x in by_batch]
    result = jnp.concatenate(by_batch, 1 + (per == "layer")) if best is None else best
    return (
        result
        if prepared or query_rank is None
        else TruncatedScores(result, prepared_queries.errors)
    )


def _warn_of_nan(numbers: list[Int[Array, ""]]) -> None:
    if any(isinstance(x, Tracer) for x in numbers):
        return
    if number := sum(int(x) for x in numbers):
        warnings.warn(
            f"{number} examples have a score that is NaN, and are not among the best there: the "
            "query's loss is NaN, or that of an example, which makes its whole batch NaN",
            stacklevel=3,
        )


def scores_of_batches(
    objective: Objective,
    params: ArrayTree,
    queries: Queries,
    train: Any,
    *,
    per: Per = "sum",
    layers: str | None = None,
    state: ArrayTree | None = None,
    experts: str | None = None,
    examples: Word | None = None,
) -> Iterator[tuple[Float[Array, "..."], Bool[Array, " n"]]]:
    """Yield the scores of each batch as it is read, to save or show them on the way.

    Args:
        objective: As for :func:`influence`.
        params: Parameters.
        queries: From :func:`prepare_queries`.
        train: A batch, or an iterable of them.
        per: As for :func:`influence`.
        layers: As for :func:`influence`.
        state: As for :func:`influence`.
        experts: As for :func:`influence`.
        examples: As for :func:`influence`.

    Yields:
        The scores of one batch, in the form of :func:`influence`, and which of its examples have
        a term that their mask keeps, ``(n,)``.
    """
    if isinstance(train, GradientStore):
        if per == "token":
            raise ValueError("per='token': a gradient store holds whole gradients of examples")
        train.check(objective, params, None, state)
        yield from train.scores(queries, layers, by_layer=per == "layer")
        return
    scorer = Examples(objective, queries, layers, experts, examples)
    score = scorer.compiled(_scores, per)
    for some in batches_of(train):
        batch = scorer.checked(params, some, state)
        call = ModelCall(params, batch, state=state)
        yield score(scorer.queries, call), scorer.exists(batch)


def _scores(scorer: Examples, call: ModelCall, per: Per) -> Float[Array, "..."]:
    return scorer.scores(scorer.queries, call, per=per)
