"""Influence functions: what training on an example does to the loss of another."""

import warnings
from collections.abc import Iterator
from html import escape
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxkfac._errors import at_least_one, one_of
from jaxkfac._text import short_repr, table_html
from jaxkfac.curvature import BlockDamping, Eigenbases
from jaxkfac.factors import Batch, Objective
from jaxkfac.interception import Word
from jaxkfac.memory import ByteSize
from jaxkfac.uses._example_gradients import Queries
from jaxkfac.uses._examples import Examples, Measurement, Per, batches_of, chosen
from jaxkfac.uses._gradient_store import GradientStore
from jaxkfac.uses._queries import prepare_queries

# ---------------- the largest scores, kept while batches are streamed


_SHOWN = 20  # queries in a notebook


class TopK(NamedTuple):
    """The largest scores of each query, the largest first.

    Attributes:
        scores: ``(Q, k)``, with ``per="layer"`` ``(Q, layers, k)``; ``-inf`` where there are fewer
            than ``k`` examples whose score is a number.
        indices: The same of the examples' places in the stream, from 0; ``-1`` where there is none.
    """

    scores: Float[Array, "*queries k"]
    indices: Int[Array, "*queries k"]

    __repr__ = short_repr

    def _repr_html_(self) -> str:
        if self.scores.ndim < 2 or isinstance(self.scores, Tracer):
            return escape(repr(self))
        k = self.scores.shape[-1]
        found = [x.reshape(-1, k)[:_SHOWN] for x in jax.device_get(self)]
        rows = [
            (str(i), *(f"{index}: {score:.3g}" if index >= 0 else "" for score, index in line))
            for i, line in enumerate(zip(s, n) for s, n in zip(*found))
        ]
        head = ("query", *(f"{rank}." for rank in range(1, k + 1)))
        notes = ["place in the stream: score"]
        if (more := self.scores.size // max(k, 1) - len(rows)) > 0:
            notes.append(f"and {more} more queries")
        return table_html(repr(self), head, rows, notes=notes)


def none_yet(shape: tuple[int, ...], k: int, dtype: jnp.dtype) -> TopK:
    """Before any example was seen."""
    return TopK(jnp.full((*shape, k), -jnp.inf, dtype), jnp.full((*shape, k), -1, jnp.int32))


def check_top_k(best: TopK, shape: tuple[int, ...]) -> None:
    """Refuse one of other queries, or of scores that were kept apart in another way.

    Raises:
        ValueError: naming both shapes.
    """
    if best.scores.shape[:-1] != shape:
        raise ValueError(
            f"top_k: expected a TopK of scores {(*shape, 'k')}, got {best.scores.shape}: go on "
            "with the queries, layers= and per= of the first part"
        )


def count_nan(scores: Float[Array, "*queries n"], exists: Bool[Array, " n"]) -> Int[Array, ""]:
    """How many examples have a score that is NaN."""
    bad = jnp.isnan(scores).reshape(-1, len(exists)).any(0)
    return (bad & exists).sum()


def joined(
    best: TopK, scores: Float[Array, "*queries n"], exists: Bool[Array, " n"], start: int
) -> TopK:
    """The best of those so far and of one batch, whose first example is number ``start``.

    A score that is NaN counts as none: ``top_k`` would rank it above all numbers.
    """
    counts = exists & ~jnp.isnan(scores)
    places = jnp.where(counts, start + jnp.arange(len(exists), dtype=jnp.int32), -1)
    every = jnp.concatenate([best.scores, jnp.where(counts, scores, -jnp.inf)], -1)
    indices = jnp.concatenate([best.indices, places], -1)
    values, at = jax.lax.top_k(every, best.scores.shape[-1])
    return TopK(values, jnp.take_along_axis(indices, at, -1))


# ----------------


class TruncatedScores(NamedTuple):
    """Scores of queries that were held at low rank.

    Attributes:
        scores: As without.
        errors: ``(Q, layers)``: what was lost of each layer's part of a query, preconditioned, as a
            ratio of Frobenius norms; 0 where a layer is held whole.
    """

    scores: Float[Array, "..."] | TopK
    errors: Float[Array, "Q layers"]


def influence(
    objective: Objective,
    params: PyTree,
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
    state: PyTree | None = None,
    experts: str | None = None,
    examples: Word | None = None,
    measurement: Measurement | None = None,
) -> Float[Array, "..."] | TopK | TruncatedScores:
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
            ``None`` where the queries were prepared with them.
        queries: ``(inputs, targets)`` or ``(inputs, targets, mask)``; masked terms count nowhere.
            Or what :func:`prepare_queries` has made of them; then ``damping``, ``query_rank`` and
            ``max_bytes`` have done their work.
        train: Such a tuple, or an iterable of them, read once. Or what :func:`gradient_store` has
            made of them: then no backward pass is taken over them, and ``experts`` and
            ``examples`` have done their work.
        damping: $\delta \ge 0$ in the units of the squared gradient, or ``"heuristic"``: for each
            block, and each slice of a stack, a tenth of its mean eigenvalue.
        layers: A pattern of layer names or parameter paths, matched whole; ``None`` takes all
            layers of the bases.
        per: ``"sum"``; ``"layer"``: scores of each layer, in the order of ``bases.layers`` (of
            those that ``layers`` matches), a stack as one; ``"token"``: of each position of the
            training examples, for outputs ``(N, S, ...)``.
        top_k: Keep only so many of the largest scores of each query (and layer) while streaming.
            Examples whose terms are all masked are left out, and scores that are NaN. A ``TopK``
            of an earlier part of the stream is gone on with, from ``start``.
        start: Place in the stream of its first example here; by default 0, and needed where
            ``top_k`` is a ``TopK``.
        query_rank: Hold each layer's part of a query, a matrix, as the nearest one of this rank,
            where that is smaller. Examples are scored the faster for it.
        max_bytes: What queries may take, those that are held and those in work, a number or
            ``"4GB"``; by default there is no bound.
        state: What a call of the model takes beside its inputs (batch statistics).
        experts: As it was given for the factors.
        examples: ``"apart"``: your word that no example's output depends on another example, where
            the program does not prove it; see :func:`value_grad_and_factors`.
        measurement: ``measurement(outputs, query)``, a scalar of one query in place of its loss: a
            margin, or the log likelihood of some tokens. It sees the outputs and the batch
            ``(inputs, targets, mask)`` of that query without the axis of examples, and
            $\nabla \ell_q$ is its gradient: positive scores mean that training on an example lowers
            the measurement. Pass the same function each time, or each call compiles.

    Returns:
        ``(Q, N)``, with ``per="layer"`` ``(Q, layers, N)``, with ``"token"`` ``(Q, N, S)`` (where
        batches differ in S the longest, shorter ones ending in zeros); with ``top_k`` a
        ``TopK(scores, indices)``. With ``query_rank`` ``TruncatedScores(scores,
        errors)`` of it.

    Raises:
        MemoryBudgetError: the queries do not fit into ``max_bytes``.
        CoupledExamplesError: an example's output depends on other examples, as by batch
            statistics outside of evaluation mode.
        UnknownLayerError: ``layers`` matches nothing, or the program lacks a layer of the bases.
        LostRowsError: the rows of a layer cannot be told apart by example, or by position.
        ValueError: bases of another model, of another likelihood (where ``bases.origin`` tells) or
            without vectors, a batch that does not fit, an iterable that is empty, zero damping of a
            block that is singular, ``layers`` that leave out another reading of the same elements
            of a parameter, a ``TopK`` of other queries or without ``start``, or a measurement that
            is no floating scalar, or is given beside prepared queries.
        TypeError: a scalar loss in place of an ``Objective``, or queries that are no tuple.

    Warns:
        UserWarning: the bases hold no curvature of the loss (``fisher="forward"``); or ``top_k``
            leaves out examples whose scores are NaN (not under ``jit``).

    Memory:
        One gradient of each query (with ``query_rank`` less), three more of those in work, one
        backward pass of a batch without gradients of parameters, and for each layer 32 MiB or
        what one example takes. Scales and lone biases keep their gradients by example, with
        ``per="token"`` by position.

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
    if isinstance(train, GradientStore):
        train.check(objective, params, bases, state)
    held, prepared = queries, isinstance(queries, Queries)
    if prepared and measurement is not None:
        raise ValueError("measurement: the queries are prepared: pass it to jk.prepare_queries")
    if not prepared:
        if bases is None:
            raise TypeError("bases: None goes with queries of jk.prepare_queries only")
        held = prepare_queries(
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
    found, best, start, bad = [], None, start or 0, []
    if isinstance(top_k, TopK):
        number = len(chosen(held, layers).layers)
        check_top_k(top_k, (held.number, number) if per == "layer" else (held.number,))
        best = top_k
    options = {"per": per, "layers": layers, "state": state, "experts": experts}
    options["examples"] = examples
    for scores, exist in scores_of_batches(objective, params, held, train, **options):
        if top_k is None:
            found.append(scores)
            continue
        if best is None:
            assert isinstance(top_k, int)
            best = none_yet(scores.shape[:-1], top_k, scores.dtype)
        best = joined(best, scores, exist, start)
        start += len(exist)
        bad.append(count_nan(scores, exist))
    _warn_of_nan(bad)
    if per == "token":
        longest = max(x.shape[-1] for x in found)
        found = [jnp.pad(x, ((0, 0), (0, 0), (0, longest - x.shape[-1]))) for x in found]
    whole = jnp.concatenate(found, 1 + (per == "layer")) if best is None else best
    return whole if prepared or query_rank is None else TruncatedScores(whole, held.errors)


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
    params: PyTree,
    queries: Queries,
    train: Any,
    *,
    per: Per = "sum",
    layers: str | None = None,
    state: PyTree | None = None,
    experts: str | None = None,
    examples: Word | None = None,
) -> Iterator[tuple[Float[Array, "..."], Bool[Array, " n"]]]:
    """The scores of each batch as it is read, for what is saved or shown on the way.

    Args:
        objective: As for :func:`influence`, like all that is not named here.
        params: Parameters.
        queries: From :func:`prepare_queries`.
        train: A batch, or an iterable of them.
        per: As for :func:`influence`.
        layers: Likewise.
        state: Likewise.
        experts: Likewise.
        examples: Likewise.

    Yields:
        The scores of one batch, as :func:`influence` returns them, and which of its examples have
        a term that their mask keeps, ``(n,)``.
    """
    if isinstance(train, GradientStore):
        if per == "token":
            raise ValueError("per='token': a gradient store holds whole gradients of examples")
        train.check(objective, params, None, state)
        yield from train.scores(queries, layers, by_layer=per == "layer")
        return
    own = Examples(objective, queries, layers, experts, examples)
    score = own.compiled(_scores, per)
    for some in batches_of(train):
        batch = own.checked(params, some, state)
        yield score(params, own.queries, batch, state), own.exists(batch)


def _scores(
    own: Examples, params: PyTree, batch: Batch, state: PyTree, per: Per
) -> Float[Array, "..."]:
    return own.scores(params, own.queries, batch, state, per=per)
