"""Known layouts by configuration only."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxkfac._errors import nearest
from jaxkfac.factors import Categorical, Objective
from jaxkfac.planning._layouts import (
    DecoderLayout,
    EncoderDecoderLayout,
    decode,
    decoder_shapes,
    encode_and_decode,
    encoder_decoder_shapes,
)

Layout = DecoderLayout | EncoderDecoderLayout

PRESETS: dict[str, Layout] = {
    "llama-7b": DecoderLayout(32, 4096, 32, 11008, 32000, fused=False),
    "phi-3-mini": DecoderLayout(32, 3072, 32, 8192, 32064, fused=True),
    "t5-xl": EncoderDecoderLayout(24, 2048, 32, 5120, 32128),
    "flan-t5-xl": EncoderDecoderLayout(24, 2048, 32, 5120, 32128),
}


class SourceAndTarget(NamedTuple):
    """Ids of an encoder-decoder, one argument of two arrays."""

    source: Any
    target: Any


class Preset(NamedTuple):
    """A training by shapes.

    Attributes:
        objective: Mean cross entropy of the next token.
        params: ``jax.ShapeDtypeStruct`` of every parameter.
        batch: Likewise ``(inputs, targets)``.
    """

    objective: Objective
    params: Any
    batch: Any


def preset(name: str, *, examples: int, tokens: int, dtype: Any = jnp.float32) -> Preset:
    """The training of a known layout.

    Args:
        name: One of ``PRESETS``.
        examples: Of the batch.
        tokens: Of an example; of its input and of its target for an encoder-decoder.
        dtype: Of the parameters.

    Raises:
        ValueError: an unknown name; the nearest are given.
    """
    if name not in PRESETS:
        raise ValueError(f"preset={name!r} is not known; the nearest are {nearest(name, PRESETS)}")
    return shaped(PRESETS[name], examples=examples, tokens=tokens, dtype=dtype)


def shaped(layout: Layout, *, examples: int, tokens: int, dtype: Any = jnp.float32) -> Preset:
    """The training of any layout; see :func:`preset`."""
    ids = jax.ShapeDtypeStruct((examples, tokens), jnp.int32)
    if isinstance(layout, EncoderDecoderLayout):
        params = encoder_decoder_shapes(layout, dtype)
        objective = Objective(_with(encode_and_decode, layout.heads), Categorical())
        return Preset(objective, params, (SourceAndTarget(ids, ids), ids))
    params = decoder_shapes(layout, dtype)
    return Preset(Objective(_with(decode, layout.heads), Categorical()), params, (ids, ids))


def _with(apply: Any, heads: int) -> Any:
    def apply_fn(params: Any, inputs: Any) -> Any:
        return apply(params, inputs, heads)

    return apply_fn
