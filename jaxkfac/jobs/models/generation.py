"""Token by token generation: the request, the choice of a token, the loop, and beam search."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from jaxkfac.jobs.models.checkpoint import Pretrained
from jaxkfac.memory import require

__all__ = [
    "EarlyStopping",
    "TokenChoice",
    "beam_search",
    "check_temperature",
    "choose",
    "continued",
    "end_ids",
    "generated_ids",
    "ids_of",
    "padded_length",
    "require_cache",
]

# ---------------- one token for each row of logits


@dataclasses.dataclass(frozen=True)
class TokenChoice:
    """How a token is chosen.

    Attributes:
        greedy: Whether to take the most likely token; otherwise one is sampled.
        top_k: Sample among this many of the most likely tokens; ``None`` means all.
        top_p: Sample among the fewest most likely tokens with at least this total probability.
    """

    greedy: bool
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k}: expected at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: expected more than 0 and at most 1")
        if self.greedy and (self.top_k, self.top_p) != (None, None):
            raise ValueError("top_k and top_p draw tokens: give a temperature and a key")


def choose(
    choice: TokenChoice,
    logits: Float[Array, "B V"],
    temperature: Float[Array, ""],
    key: Key[Array, ""],
) -> Int[Array, " B"]:
    """Choose ids; logits are divided by the temperature before ``top_k`` and ``top_p`` apply."""
    if choice.greedy:
        return jnp.argmax(logits, -1).astype(jnp.int32)
    scaled = logits.astype(jnp.float32) / temperature
    if choice.top_k is not None:
        least = jax.lax.top_k(scaled, min(choice.top_k, scaled.shape[-1]))[0][:, -1:]
        scaled = jnp.where(scaled < least, -jnp.inf, scaled)
    if choice.top_p is not None:
        order = jnp.sort(scaled, axis=-1, descending=True)
        weights = jax.nn.softmax(order, -1)
        before = jnp.cumsum(weights, -1) - weights  # 0 for the most likely token
        least = jnp.min(jnp.where(before < choice.top_p, order, jnp.inf), -1, keepdims=True)
        scaled = jnp.where(scaled < least, -jnp.inf, scaled)
    return jax.random.categorical(key, scaled).astype(jnp.int32)


# ---------------- a request for tokens, for any model: input ids, memory of a cache, output ids


# Rows are padded to a multiple of this, so that few programs are compiled.
_ROUND = 32


def check_temperature(temperature: float | int, key: Key[Array, ""] | None) -> None:
    """Raise a ``ValueError`` if tokens cannot be sampled with these."""
    if not temperature >= 0 or (temperature > 0 and key is None):  # also refuses NaN
        raise ValueError(f"temperature={temperature}: expected 0, or more with a key")


def ids_of(
    pretrained: Pretrained, text: Any, name: str, *, ids_of_text: Callable[[Any, str], list[int]]
) -> list[int]:
    """The token ids of a text; ids are checked and returned.

    Args:
        pretrained: The model, for its tokenizer and vocabulary.
        text: A text, or ids.
        name: Name of the argument, for error messages.
        ids_of_text: ``prompt_ids`` for a text that is continued, ``source_ids`` for an encoder's.

    Raises:
        ValueError: there are no tokens, ids are outside the vocabulary, or a text is given
            without a tokenizer.
    """
    if isinstance(text, str):
        if pretrained.tokenizer is None:
            raise ValueError("this checkpoint came without a tokenizer: give token ids")
        text = ids_of_text(pretrained.tokenizer, text)
    ids, vocabulary = [int(i) for i in text], pretrained.config.vocabulary
    if not ids or min(ids) < 0 or max(ids) >= vocabulary:
        what = f"ids from {min(ids)} to {max(ids)}" if ids else "no tokens"
        raise ValueError(f"{name}: expected ids in [0, {vocabulary}), got {what}")
    return ids


def padded_length(rows: Sequence[Sequence[int]]) -> int:
    """The length that rows of ids are padded to."""
    return math.ceil(max(map(len, rows)) / _ROUND) * _ROUND


def require_cache(cache: PyTree, *, what: str, instead: str) -> None:
    """Raise a ``MemoryBudgetError`` if a cache of these shapes does not fit the device."""
    require(
        sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache)),
        device=jnp.zeros(()).device,
        what=f"{what}: the cache of keys and values",
        instead=instead,
    )


def end_ids(pretrained: Pretrained) -> tuple[int, ...]:
    """The ids that end generation, those of the config first."""
    tokenizer_ends = () if pretrained.tokenizer is None else pretrained.tokenizer.eos_ids
    return tuple(dict.fromkeys((*pretrained.config.eos_ids, *tokenizer_ends)))


def generated_ids(
    ids: Int[Array, "requests steps"],
    finite: Bool[Array, " requests"],
    *,
    name: str,
    adapted: bool,
) -> list[list[int]]:
    """The ids of each request, without the -1 after its end.

    Args:
        ids: Ids from the program.
        finite: Whether the logits of each request were finite.
        name: Name of the requests, for error messages.
        adapted: Whether adapters are used.

    Raises:
        ValueError: logits are not finite.
    """
    bad = np.flatnonzero(~np.asarray(finite))
    if len(bad):
        raise ValueError(
            f"the logits of {name} {bad.tolist()} are not finite (NaN or "
            "infinite), so no token is the likeliest: look for NaN in the parameters"
            + " and the adapters"
            * adapted
        )
    return [[int(i) for i in row if i >= 0] for row in np.asarray(ids)]


# ---------------- the loop over new tokens


# step(ids (B,), number of the token, state) -> logits (B, V) of the next token, state
Step = Callable[[Array, Array, Any], tuple[Array, Any]]


class Continued(NamedTuple):
    """New tokens.

    Attributes:
        ids: ``(B, steps)``, -1 after the end of each answer.
        finite: Whether the logits of each row were finite.
    """

    ids: Int[Array, "B steps"]
    finite: Bool[Array, " B"]


def continued(
    logits: Array,
    state: Any,
    step: Step,
    take: Callable[[Array, Array], Array],
    *,
    steps: int,
    ends: Int[Array, " E"],
) -> Continued:
    """Continue from the first logits ``(B, V)`` until every row has ended.

    Args:
        logits: Logits of the first new token.
        state: State of the model, such as a cache.
        step: Runs the model on the previous token.
        take: Maps logits and the number of the token to ids.
        steps: Largest number of tokens.
        ends: Ids that end an answer.
    """

    def goes_on(carry: Any) -> Array:
        number, done, *_ = carry
        return (number < steps) & ~done.all()

    def one_more(carry: Any) -> Any:
        number, done, ids, state, new, finite = carry
        logits, state = step(jnp.maximum(ids, 0), number, state)
        finite &= done | is_finite(logits)
        ids = jnp.where(done, -1, take(logits, number))
        new = jax.lax.dynamic_update_slice(new, ids[:, None], (0, number))
        return number + 1, done | is_in(ids, ends), ids, state, new, finite

    ids = take(logits, jnp.zeros((), jnp.int32))
    new = jnp.full((logits.shape[0], steps), -1, jnp.int32).at[:, 0].set(ids)
    start = (jnp.ones((), jnp.int32), is_in(ids, ends), ids, state, new, is_finite(logits))
    return Continued(*jax.lax.while_loop(goes_on, one_more, start)[-2:])


def is_in(ids: Int[Array, "..."], ends: Int[Array, " E"]) -> Bool[Array, "..."]:
    """Whether ids end an answer."""
    return (ids[..., None] == ends).any(-1)


def is_finite(logits_BxV: Array) -> Array:
    """Whether rows have no NaN or infinity; -infinity may exclude tokens, but not all.

    The maximum is not used: XLA's CPU reduction of many columns drops NaN (jax 0.10.2).
    """
    bad = jnp.isnan(logits_BxV) | (logits_BxV == jnp.inf)
    return jnp.isfinite(logits_BxV).any(-1) & ~bad.any(-1)


# ---------------- beam search, as in transformers
#
# Shape suffixes: N examples, K beams, C candidates, L tokens, V vocabulary.


EarlyStopping = Literal["never"] | bool

_NEVER = -1e9  # score of an invalid beam


class _Beams(NamedTuple):
    number: Array  # tokens so far
    running_NxKxL: Array
    scores_NxK: Array  # their summed log probabilities
    ended_NxKxL: Array
    ended_scores_NxK: Array  # divided by length ** penalty
    has_ended_NxK: Array
    may_improve_Nx1: Array
    exhausted: Array
    logits: Array
    state: Any
    finite_N: Array


def beam_search(
    logits: Array,
    state: Any,
    step: Step,
    reorder: Callable[[Any, Array], Any],
    *,
    num_beams: int,
    steps: int,
    ends: Int[Array, " E"],
    length_penalty: float,
    early_stopping: EarlyStopping,
) -> tuple[Int[Array, "N steps"], Bool[Array, " N"]]:
    """The best sequence of each example, -1 after its end; whether its logits were all finite.

    Args:
        logits: Logits of the first new token, ``(N K, V)``: each example ``num_beams`` times.
        state: State of the model, a cache of ``N K`` rows.
        step: Runs the model on the previous token.
        reorder: Maps a state and rows ``(N K,)`` to the state of those rows.
        num_beams: Number of beams of each example.
        steps: Largest number of tokens.
        ends: Ids that end a sequence.
        length_penalty: The score of a finished sequence is its log probability divided by its
            length to this power.
        early_stopping: ``True``: stop when an example has ``num_beams`` finished sequences.
            ``False``: when the best running beam, at its current length, is no better than the
            worst of them. ``"never"``: when it could not be better at any length.
    """
    rows, vocabulary = logits.shape
    examples = rows // num_beams

    def of_examples(logits: Array) -> Bool[Array, " N"]:
        return is_finite(logits).reshape(examples, num_beams).all(1)

    # So that at least num_beams candidates have not ended.
    num_candidates = max(2, 1 + ends.shape[0]) * num_beams

    def one_more(b: _Beams) -> _Beams:
        length = (b.number + 1).astype(jnp.float32)
        candidate_scores = jax.nn.log_softmax(b.logits.astype(jnp.float32), -1)
        candidate_scores = (
            candidate_scores.reshape(examples, num_beams, -1) + b.scores_NxK[:, :, None]
        )
        scores_NxC, flat_NxC = jax.lax.top_k(candidate_scores.reshape(examples, -1), num_candidates)
        beam_NxC, ids_NxC = flat_NxC // vocabulary, flat_NxC % vocabulary
        sequences = jnp.take_along_axis(b.running_NxKxL, beam_NxC[:, :, None], 1)
        at_number = jnp.arange(steps) == b.number
        sequences_NxCxL = jnp.where(at_number, ids_NxC[:, :, None], sequences)
        stops_NxC = is_in(ids_NxC, ends) | (b.number + 1 >= steps)

        going = scores_NxC + jnp.where(stops_NxC, _NEVER, 0.0)
        scores_NxK, chosen_NxK = jax.lax.top_k(going, num_beams)
        running_NxKxL = jnp.take_along_axis(sequences_NxCxL, chosen_NxK[:, :, None], 1)
        source_NxK = jnp.take_along_axis(beam_NxC, chosen_NxK, 1)

        just = stops_NxC & (jnp.arange(num_candidates) < num_beams)
        new = scores_NxC / length**length_penalty
        full = b.has_ended_NxK.all(-1, keepdims=True) & (early_stopping is True)
        for is_out in (full, ~b.may_improve_Nx1, ~just):
            new = new + jnp.where(is_out, _NEVER, 0.0)
        merged = jnp.concatenate([b.ended_scores_NxK, new], 1)
        ended_scores_NxK, best_NxK = jax.lax.top_k(merged, num_beams)
        every = jnp.concatenate([b.ended_NxKxL, sequences_NxCxL], 1)
        ended_NxKxL = jnp.take_along_axis(every, best_NxK[:, :, None], 1)
        every = jnp.concatenate([b.has_ended_NxK, just], 1)
        has_ended_NxK = jnp.take_along_axis(every, best_NxK, 1)

        longest = early_stopping == "never" and length_penalty > 0
        possible = scores_NxK[:, :1] / (steps if longest else length) ** length_penalty
        worst = jnp.where(has_ended_NxK, ended_scores_NxK.min(1, keepdims=True), _NEVER)
        may_improve = b.may_improve_Nx1 & (possible > worst).any(-1, keepdims=True)

        flat = (source_NxK + num_beams * jnp.arange(examples)[:, None]).reshape(-1)
        last = jnp.take_along_axis(running_NxKxL, jnp.full((1, 1, 1), b.number), 2).reshape(-1)
        logits, state = step(last, b.number + 1, reorder(b.state, flat))
        return _Beams(
            b.number + 1, running_NxKxL, scores_NxK, ended_NxKxL, ended_scores_NxK, has_ended_NxK,
            may_improve, stops_NxC.all(), logits, state,
            b.finite_N & (of_examples(logits) | ~may_improve[:, 0]),
        )  # fmt: skip

    def goes_on(b: _Beams) -> Array:
        full = b.has_ended_NxK.all() & (early_stopping is True)
        return b.may_improve_Nx1.any() & ~full & ~b.exhausted

    nothing = jnp.full((examples, num_beams, steps), -1, jnp.int32)
    none = jnp.full((examples, num_beams), _NEVER, jnp.float32)
    start = _Beams(
        number=jnp.zeros((), jnp.int32),
        running_NxKxL=nothing,
        scores_NxK=none.at[:, 0].set(0.0),  # all beams of an example start from the same one
        ended_NxKxL=nothing,
        ended_scores_NxK=none,
        has_ended_NxK=jnp.zeros((examples, num_beams), bool),
        may_improve_Nx1=jnp.ones((examples, 1), bool),
        exhausted=jnp.zeros((), bool),
        logits=logits,
        state=state,
        finite_N=of_examples(logits),
    )
    final = jax.lax.while_loop(goes_on, one_more, start)
    return final.ended_NxKxL[:, 0], final.finite_N
