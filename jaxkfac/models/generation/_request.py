"""A request for tokens, whatever the model: ids in, room for a cache, ids out."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Key, PyTree

from jaxkfac.memory import require
from jaxkfac.models.checkpoint import Pretrained

# Rows are padded to a multiple of this, so that few lengths are compiled.
_ROUND = 32


def check_temperature(temperature: float | int, key: Key[Array, ""] | None) -> None:
    """Raise a ``ValueError`` if nothing can be drawn with these."""
    if not temperature >= 0 or (temperature > 0 and key is None):  # NaN is no temperature
        raise ValueError(f"temperature={temperature}: expected 0, or more with a key")


def ids_of(pretrained: Pretrained, text: Any, name: str) -> list[int]:
    """The token ids of a text, or of ids.

    Args:
        pretrained: Its tokenizer, and how many ids there are.
        text: A text, or ids.
        name: Of the argument, for errors.

    Raises:
        ValueError: no tokens, ids beyond the vocabulary, or a text without a tokenizer.
    """
    if isinstance(text, str):
        if pretrained.tokenizer is None:
            raise ValueError("this checkpoint came without a tokenizer: give token ids")
        text = pretrained.tokenizer.encode(text)
    ids, vocabulary = [int(i) for i in text], pretrained.config.vocabulary
    if not ids or min(ids) < 0 or max(ids) >= vocabulary:
        what = f"ids from {min(ids)} to {max(ids)}" if ids else "no tokens"
        raise ValueError(f"{name}: expected ids in [0, {vocabulary}), got {what}")
    return ids


def padded_length(rows: Sequence[Sequence[int]]) -> int:
    """The length to which rows of ids are padded."""
    return math.ceil(max(map(len, rows)) / _ROUND) * _ROUND


def require_cache(cache: PyTree, *, what: str, instead: str) -> None:
    """Raise a ``MemoryBudgetError`` if a cache of these shapes has no room on the device."""
    require(
        sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache)),
        device=jnp.zeros(()).device,
        what=f"{what}: the cache of keys and values",
        instead=instead,
    )


def end_ids(pretrained: Pretrained) -> tuple[int, ...]:
    """The ids that end what is generated, those of the config first."""
    known = () if pretrained.tokenizer is None else pretrained.tokenizer.eos_ids
    return tuple(dict.fromkeys((*pretrained.config.eos_ids, *known)))


def generated_ids(
    ids: Int[Array, "requests steps"],
    finite: Bool[Array, " requests"],
    *,
    name: str,
    adapted: bool,
) -> list[list[int]]:
    """The ids of each request, without the -1 behind its end.

    Args:
        ids: What the program returned.
        finite: Whether the logits of each request were.
        name: Of the requests, for errors.
        adapted: Whether there are adapters.

    Raises:
        ValueError: logits that are not finite.
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
