"""Models in flax NNX, and pretrained weights for them."""

from jaxkfac.models._mlp import MLP
from jaxkfac.models._vision_transformer import VisionTransformer, VisionTransformerConfig
from jaxkfac.models.checkpoint import Pretrained, Tokenizer
from jaxkfac.models.decoder import (
    Cache,
    Cached,
    Decoder,
    DecoderConfig,
    Rotary,
    Tokens,
    decoder_shapes,
    empty_cache,
    generate,
    load_decoder,
)
from jaxkfac.models.encoder_decoder import (
    EncoderDecoder,
    EncoderDecoderConfig,
    Pairs,
    load_encoder_decoder,
)
from jaxkfac.models.pretrained import smollm2

__all__ = [
    "MLP",
    "Cache",
    "Cached",
    "Decoder",
    "DecoderConfig",
    "EncoderDecoder",
    "EncoderDecoderConfig",
    "Pairs",
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
    "load_encoder_decoder",
    "smollm2",
]
