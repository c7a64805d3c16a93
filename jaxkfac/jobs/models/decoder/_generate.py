"""Answers token by token, from a cache of keys and values."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, PyTree

from jaxkfac._arguments import ArrayTree
from jaxkfac._errors import at_least_one
from jaxkfac._text import prompt_ids
from jaxkfac.interception.values import is_encoded
from jaxkfac.jobs.models.checkpoint import Pretrained
from jaxkfac.jobs.models.decoder._attention import Cached, Tokens, empty_cache
from jaxkfac.jobs.models.decoder._config import DecoderConfig
from jaxkfac.jobs.models.generation import (
    TokenChoice,
    check_temperature,
    choose,
    continued,
    end_ids,
    generated_ids,
    ids_of,
    padded_length,
    require_cache,
)
from jaxkfac.lslora import Bank

Prompt = str | Sequence[int] | jax.Array | np.ndarray


def generate(
    pretrained: Pretrained,
    prompt: Prompt | Sequence[Prompt],
    *,
    max_new_tokens: int = 64,
    temperature: float | int = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    key: Key[Array, ""] | None = None,
    adapted: Callable[..., Any] | None = None,
    adapters: PyTree = None,
    adapter: Any = None,
) -> Any:
    """Continue a prompt, or several at once, until a token of ``eos_ids``.

    A single compiled program reads the prompts and loops over the new tokens. It is compiled
    again if the number of prompts, ``max_new_tokens`` or the length of the longest prompt,
    rounded up to a multiple of 32, changes. Prompts do not attend to each other or to the padding
    on their left. If angles depend on the length of the text (longrope, dynamic), that length is
    the prompt with ``max_new_tokens``.

    Args:
        pretrained: From :func:`load_decoder`.
        prompt: A text, token ids (``tokenizer.chat([...])`` or an integer array), or a list of
            these; rows of a matrix are prompts of equal length. A text gets the start tokens that
            the tokenizer adds, and no end token; ids are used as they are.
        max_new_tokens: Largest number of tokens to add.
        temperature: 0 takes the most likely token; otherwise logits are divided by it and a
            token is sampled.
        top_k: Sample among this many of the most likely tokens.
        top_p: Sample among the fewest most likely tokens that together have this probability.
        key: Key for sampling.
        adapted: ``jk.lslora.attach(pretrained.apply_fn, config)``: generate with this function.
        adapters: Adapters for ``adapted``.
        adapter: For ``adapted`` with a bank: an index, or one per prompt; -1 is the base
            model.

    Returns:
        The added text for a text; for ids the added ids, including the one that ended the
        answer. For a list, a list of these.

    Raises:
        ValueError: a prompt is empty, has ids outside the vocabulary, or is too long for the
            context; a text is given without a tokenizer, a temperature without a key, ``top_k`` or
            ``top_p`` without a temperature, or ``adapters`` or quantised parameters without
            ``adapted``; an ``adapter`` is outside the bank; or logits are not finite.
        MemoryBudgetError: the cache does not fit.

    Memory:
        A cache of ``2 L B S K Dh`` elements, S the rounded-up prompt with the new tokens; for
        the prompt also the activations of one block.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from flax import nnx
        >>> import jaxkfac as jk
        >>> from jaxkfac.jobs.models import Decoder, DecoderConfig, Pretrained
        >>> config = DecoderConfig(vocabulary=97, width=32, hidden=48, depth=2, num_heads=4,
        ...                        num_kv_heads=2, head_size=8, context=64)
        >>> model = Pretrained(config, *jk.from_nnx(Decoder(config, rngs=nnx.Rngs(0))), None)
        >>> len(generate(model, [5, 6, 7], max_new_tokens=4))
        4
    """
    at_least_one(max_new_tokens=max_new_tokens)
    if adapted is None and any(map(is_encoded, _leaves(pretrained.params))):
        raise ValueError(
            "the parameters are quantised: give adapted=jk.lslora.attach(apply_fn, config), which "
            "reads them, and adapters= (may be {})"
        )
    check_temperature(temperature, key)
    if adapted is None and (adapters is not None or adapter is not None):
        raise ValueError("adapters: give adapted=jk.lslora.attach(apply_fn, config) with them")
    if isinstance(prompt, jax.Array | np.ndarray):
        prompt = _as_list(prompt)
    single = isinstance(prompt, str) or all(isinstance(x, int | np.integer) for x in prompt)
    prompts: Any = [prompt] if single else list(prompt)
    rows = [ids_of(pretrained, x, "prompt", ids_of_text=prompt_ids) for x in prompts]
    for ids in rows:
        _check_context(pretrained.config, len(ids), max_new_tokens)
    tokens = _side_by_side(rows)
    config, params = pretrained.config, pretrained.params
    dtype = params["model"]["embed_tokens"]["embedding"].dtype
    places = tokens.ids.shape[1] + max_new_tokens
    require_cache(
        jax.eval_shape(lambda: empty_cache(config, len(rows), places, dtype)),
        what="generate",
        instead="give fewer prompts at once, or a smaller max_new_tokens",
    )
    if adapter is not None and not isinstance(adapter, jax.Array):
        adapter = np.asarray(adapter)  # as an array, so the program depends on its shape only
    if isinstance(adapters, Bank):
        adapters.check_index(adapter)
    operands = (params,) if adapted is None else (params, adapters, adapter)
    new, finite = _program(
        pretrained.apply_fn if adapted is None else adapted,
        operands,
        tokens,
        jax.random.key(0) if key is None else key,
        jnp.asarray(max(temperature, 1e-30), jnp.float32),
        jnp.asarray(end_ids(pretrained), jnp.int32),
        static=_Static(config, dtype, max_new_tokens, TokenChoice(temperature == 0, top_k, top_p)),
    )
    answers = generated_ids(new, finite, name="prompts", adapted=adapted is not None)
    out = [
        _text(pretrained, ids) if isinstance(given_prompt, str) else ids
        for given_prompt, ids in zip(prompts, answers, strict=True)
    ]
    return out[0] if single else out


class _Static(NamedTuple):
    """Static arguments of the compiled program."""

    config: DecoderConfig
    dtype: Any
    steps: int
    choice: TokenChoice


@functools.partial(jax.jit, static_argnums=0, static_argnames="static")
def _program(
    model: Callable[..., Any],
    operands: tuple[Any, ...],
    tokens: Tokens,
    key: Array,
    temperature: Array,
    ends: Array,
    *,
    static: _Static,
) -> tuple[Array, Array]:
    """New ids ``(B, steps)``, -1 after the end of each answer; whether logits were finite."""
    params, *adapters = operands
    rows, length = tokens.ids.shape
    assert tokens.positions is not None
    last = tokens.positions[:, -1]
    lengths = last + 1 + static.steps
    cache = empty_cache(static.config, rows, length + static.steps, static.dtype, lengths=lengths)

    def run(tokens: Tokens, cache: Any) -> Any:
        if adapters:
            return model(params, adapters[0], Cached(tokens, cache), adapter=adapters[1])
        return model(params, Cached(tokens, cache))

    def take(logits: Array, number: Array) -> Array:
        return choose(static.choice, logits, temperature, jax.random.fold_in(key, number))

    def step(ids: Array, number: Array, cache: Any) -> Any:
        return run(Tokens(ids[:, None], (last + number)[:, None]), cache)

    logits, cache = run(tokens, cache)
    return continued(logits, cache, step, take, steps=static.steps, ends=ends)


def _as_list(prompt: Any) -> list[Any]:
    if not np.issubdtype(prompt.dtype, np.integer) or prompt.ndim not in (1, 2):
        raise ValueError(
            "prompt: expected an array of integers, one prompt or a row for each, got "
            f"{prompt.dtype}{list(prompt.shape)}"
        )
    return np.asarray(prompt).tolist()


def _check_context(config: DecoderConfig, length: int, max_new_tokens: int) -> None:
    room = config.longest - length
    if room < max_new_tokens:
        advice = f"ask for at most {room} new ones" if room > 0 else "shorten it"
        raise ValueError(
            f"prompt: {length} tokens and {max_new_tokens} new ones do not fit the context of "
            f"{config.longest}: {advice}"
        )


def _side_by_side(rows: Sequence[Sequence[int]]) -> Tokens:
    """Pad on the left, so that all rows end at the same place."""
    ids, positions, segments = np.zeros((3, len(rows), padded_length(rows)), np.int32)
    for number, row in enumerate(rows):
        ids[number, -len(row) :] = row
        positions[number, -len(row) :] = np.arange(len(row))
        segments[number, -len(row) :] = 1
    return Tokens(jnp.asarray(ids), jnp.asarray(positions), jnp.asarray(segments))


def _leaves(params: ArrayTree) -> list[Any]:
    return jax.tree.leaves(params, is_leaf=is_encoded)


def _text(pretrained: Pretrained, ids: list[int]) -> str:
    if ids and ids[-1] in end_ids(pretrained):
        ids = ids[:-1]
    assert pretrained.tokenizer is not None
    return pretrained.tokenizer.decode(ids)
