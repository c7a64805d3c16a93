"""Generation of targets token by token, with a cache of keys and values."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, PyTree

from jaxkfac._errors import at_least_one
from jaxkfac._text import source_ids
from jaxkfac.interception.values import is_encoded
from jaxkfac.jobs.models.checkpoint import Pretrained
from jaxkfac.jobs.models.encoder_decoder._blocks import (
    CachedPairs,
    Pairs,
    PairsCache,
    empty_pairs_cache,
)
from jaxkfac.jobs.models.encoder_decoder._config import EncoderDecoderConfig
from jaxkfac.jobs.models.generation import (
    EarlyStopping,
    TokenChoice,
    beam_search,
    check_temperature,
    choose,
    continued,
    end_ids,
    generated_ids,
    ids_of,
    padded_length,
    require_cache,
)

Source = str | Sequence[int]


def generate_targets(
    pretrained: Pretrained,
    sources: Sequence[Source],
    *,
    max_new_tokens: int = 64,
    num_beams: int = 1,
    length_penalty: float | int = 1.0,
    early_stopping: EarlyStopping = False,
    temperature: float | int = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    key: Key[Array, ""] | None = None,
    adapted: Callable[..., Any] | None = None,
    adapters: PyTree = None,
) -> list[Any]:
    """Generate the target of each source, until a token of ``eos_ids``.

    A single compiled program reads the sources and loops over the new tokens. It is compiled
    again if the number of sources, ``max_new_tokens`` or the length of the longest source,
    rounded up to a multiple of 32, changes.

    Args:
        pretrained: From :func:`load_encoder_decoder`.
        sources: Texts, or token ids including the end token that the tokenizer adds.
        max_new_tokens: Largest number of tokens of each target.
        num_beams: More than one means beam search, as in transformers.
        length_penalty: For beams: log probabilities are divided by the length to this power.
        early_stopping: For beams: ``True`` stops an example at ``num_beams`` finished sequences,
            ``False`` when the best running beam is no better at its current length, ``"never"``
            when it could not be better at any length.
        temperature: 0 takes the most likely token; otherwise logits are divided by it and a
            token is sampled.
        top_k: Sample among this many of the most likely tokens.
        top_p: Sample among the fewest most likely tokens that together have this probability.
        key: Key for sampling.
        adapted: ``jk.lslora.attach(pretrained.apply_fn, config)``: generate with this function.
        adapters: Adapters for ``adapted``.

    Returns:
        For each text the text of its target; for ids the ids, including the end token.

    Raises:
        ValueError: a source is empty or has ids outside the vocabulary; a text is given without a
            tokenizer, a temperature without a key or with beams, or quantised parameters or
            ``adapters`` without ``adapted``; or logits are not finite.
        MemoryBudgetError: the cache does not fit.

    Memory:
        A cache of ``2 L B (S + P) H K`` elements, S the rounded-up source and P the new tokens;
        ``num_beams`` times that with beams, which also read each source that often.

    Example:
        >>> from flax import nnx
        >>> import jaxkfac as jk
        >>> from jaxkfac.jobs.models import EncoderDecoder, EncoderDecoderConfig, Pretrained
        >>> config = EncoderDecoderConfig(vocabulary=97, width=32, hidden=48, encoder_depth=2,
        ...                               decoder_depth=2, num_heads=4, head_size=8)
        >>> model = EncoderDecoder(config, rngs=nnx.Rngs(0))
        >>> pretrained = Pretrained(config, *jk.from_nnx(model), None)
        >>> [len(ids) for ids in generate_targets(pretrained, [[5, 6, 7]], max_new_tokens=4)]
        [4]
    """
    at_least_one(max_new_tokens=max_new_tokens, num_beams=num_beams)
    check_temperature(temperature, key)
    if num_beams > 1 and temperature > 0:
        raise ValueError("num_beams and a temperature: beams take the likeliest sequences")
    if early_stopping not in (True, False, "never"):
        raise ValueError(f"early_stopping={early_stopping!r}: expected True, False or 'never'")
    params = pretrained.params
    if adapted is None and (
        adapters is not None or any(map(is_encoded, jax.tree.leaves(params, is_leaf=is_encoded)))
    ):
        raise ValueError(
            "adapters and quantised parameters are read by "
            "adapted=jk.lslora.attach(apply_fn, config): give it, with adapters= (may be {})"
        )
    if isinstance(sources, str) or any(isinstance(source, int) for source in sources):
        raise TypeError(f"sources: expected several, got one: give [{str(sources)[:40]!r}, ...]")
    rows = [ids_of(pretrained, x, "sources", ids_of_text=source_ids) for x in sources]
    if not rows:
        return []
    config, dtype = pretrained.config, params["shared"]["embedding"].dtype
    source, mask = _side_by_side([row for row in rows for _ in range(num_beams)], config.pad_id)
    batch, length = source.shape
    require_cache(
        jax.eval_shape(lambda: empty_pairs_cache(config, batch, length, max_new_tokens, dtype)),
        what="generate_targets",
        instead="give fewer sources at once, fewer beams, or a smaller max_new_tokens",
    )
    new, finite = _program(
        pretrained.apply_fn if adapted is None else adapted,
        (params,) if adapted is None else (params, adapters),
        source,
        mask,
        jax.random.key(0) if key is None else key,
        jnp.asarray(max(temperature, 1e-30), jnp.float32),
        jnp.asarray(end_ids(pretrained), jnp.int32),
        static=_Targets(
            config,
            dtype,
            max_new_tokens,
            TokenChoice(temperature == 0, top_k, top_p),
            num_beams,
            float(length_penalty),
            early_stopping,
        ),
    )
    answers = generated_ids(new, finite, name="sources", adapted=adapted is not None)
    return [
        pretrained.tokenizer.decode(ids)
        if isinstance(given_source, str) and pretrained.tokenizer
        else ids
        for given_source, ids in zip(sources, answers, strict=True)
    ]


class _Targets(NamedTuple):
    """Static arguments of the compiled program."""

    config: EncoderDecoderConfig
    dtype: Any
    steps: int
    choice: TokenChoice
    num_beams: int
    length_penalty: float
    early_stopping: EarlyStopping


@functools.partial(jax.jit, static_argnums=0, static_argnames="static")
def _program(
    model: Callable[..., Any],
    operands: tuple[Any, ...],
    source: Array,
    mask: Array,
    key: Array,
    temperature: Array,
    ends: Array,
    *,
    static: _Targets,
) -> tuple[Array, Array]:
    """New ids ``(B, steps)``, -1 after the end of each answer; whether logits were finite."""
    rows, length = source.shape

    def run(ids: Array, cache: PairsCache) -> tuple[Array, PairsCache]:
        return model(*operands, CachedPairs(Pairs(source, mask, ids[:, None]), cache))

    def step(ids: Array, number: Array, cache: PairsCache) -> tuple[Array, PairsCache]:
        return run(ids, cache)

    cache = empty_pairs_cache(static.config, rows, length, static.steps, static.dtype)
    logits, cache = run(jnp.full(rows, static.config.start_id, jnp.int32), cache)
    if static.num_beams == 1:

        def take(logits: Array, number: Array) -> Array:
            return choose(static.choice, logits, temperature, jax.random.fold_in(key, number))

        return continued(logits, cache, step, take, steps=static.steps, ends=ends)

    def reorder(cache: PairsCache, beams: Array) -> PairsCache:
        own = jax.tree.map(lambda x: x[:, beams], cache.own)  # the source is that of all beams
        return cache._replace(own=own)

    return beam_search(
        logits,
        cache,
        step,
        reorder,
        num_beams=static.num_beams,
        steps=static.steps,
        ends=ends,
        length_penalty=static.length_penalty,
        early_stopping=static.early_stopping,
    )


def _side_by_side(rows: Sequence[Sequence[int]], pad: int) -> tuple[Array, Array]:
    shape = len(rows), padded_length(rows)
    ids, mask = np.full(shape, pad, np.int32), np.zeros(shape, bool)
    for number, row in enumerate(rows):
        ids[number, : len(row)], mask[number, : len(row)] = row, True
    return jnp.asarray(ids), jnp.asarray(mask)
