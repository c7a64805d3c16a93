"""Models in flax NNX, and pretrained weights for them."""

from jaxkfac.models._mlp import MLP
from jaxkfac.models._vision_transformer import VisionTransformer, VisionTransformerConfig
from jaxkfac.models.decoder import (
    Cache,
    Cached,
    Decoder,
    DecoderConfig,
    Pretrained,
    Rotary,
    Tokenizer,
    Tokens,
    decoder_shapes,
    empty_cache,
    generate,
    load_decoder,
)
from jaxkfac.models.pretrained import smollm2

__all__ = [
    "MLP",
    "Cache",
    "Cached",
    "Decoder",
    "DecoderConfig",
    "Pretrained",
    "Rotary",
    "Tokenizer",
    "Tokens",
    "VisionTransformer",
    "VisionTransformerConfig",
    "decoder_shapes",
    "empty_cache",
    "generate",
    "load_decoder",
    "smollm2",
]
