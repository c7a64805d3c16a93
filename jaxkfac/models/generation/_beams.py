"""Beam search, as transformers does it.

Shape suffixes: N examples, K beams, C candidates, L tokens, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxkfac.models.generation._loop import Step, is_finite, is_in

EarlyStopping = Literal["never"] | bool

_NEVER = -1e9  # the score of what is no beam


class _Beams(NamedTuple):
    number: Array  # tokens so far
    running_NxKxL: Array
    scores_NxK: Array  # summed log probabilities of those
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
    """The best sequence of each example, -1 behind its end; whether all its logits were finite.

    Args:
        logits: Of the first new token, ``(N K, V)``: each example ``num_beams`` times.
        state: Of the model, a cache of ``N K`` rows.
        step: The model on the token before.
        reorder: From a state and rows ``(N K,)`` to the state of those rows.
        num_beams: Beams of each example.
        steps: The most tokens.
        ends: Ids that end a sequence.
        length_penalty: A finished sequence's score is its log probability over its length to
            this power.
        early_stopping: ``True``: stop when an example has ``num_beams`` finished sequences.
            ``False``: when the best running beam, at its present length, is no better than the
            worst of them. ``"never"``: when it could not be at any length.
    """
    rows, vocabulary = logits.shape
    examples = rows // num_beams

    def of_examples(logits: Array) -> Bool[Array, " N"]:
        return is_finite(logits).reshape(examples, num_beams).all(1)

    kept = max(2, 1 + ends.shape[0]) * num_beams  # enough that num_beams of them have no end

    def one_more(b: _Beams) -> _Beams:
        length = (b.number + 1).astype(jnp.float32)
        each = jax.nn.log_softmax(b.logits.astype(jnp.float32), -1)
        each = each.reshape(examples, num_beams, -1) + b.scores_NxK[:, :, None]
        scores_NxC, flat_NxC = jax.lax.top_k(each.reshape(examples, -1), kept)
        beam_NxC, ids_NxC = flat_NxC // vocabulary, flat_NxC % vocabulary
        sequences = jnp.take_along_axis(b.running_NxKxL, beam_NxC[:, :, None], 1)
        at_number = jnp.arange(steps) == b.number
        sequences_NxCxL = jnp.where(at_number, ids_NxC[:, :, None], sequences)
        stops_NxC = is_in(ids_NxC, ends) | (b.number + 1 >= steps)

        going = scores_NxC + jnp.where(stops_NxC, _NEVER, 0.0)
        scores_NxK, chosen_NxK = jax.lax.top_k(going, num_beams)
        running_NxKxL = jnp.take_along_axis(sequences_NxCxL, chosen_NxK[:, :, None], 1)
        source_NxK = jnp.take_along_axis(beam_NxC, chosen_NxK, 1)

        just = stops_NxC & (jnp.arange(kept) < num_beams)
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
        scores_NxK=none.at[:, 0].set(0.0),  # the beams of an example begin as one
        ended_NxKxL=nothing,
        ended_scores_NxK=none,
        has_ended_NxK=jnp.zeros((examples, num_beams), bool),
        may_improve_Nx1=jnp.ones((examples, 1), bool),
        exhausted=jnp.zeros((), bool),
        logits=logits,
        state=state,
        finite_N=of_examples(logits),
    )
    found = jax.lax.while_loop(goes_on, one_more, start)
    return found.ended_NxKxL[:, 0], found.finite_N
