"""Models in flax NNX, and pretrained weights for them."""

from jaxkfac.jobs.models._networks import MLP, VisionTransformer, VisionTransformerConfig
from jaxkfac.jobs.models.checkpoint import Pretrained, Tokenizer, byte_tokenizer
from jaxkfac.jobs.models.decoder import (
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
from jaxkfac.jobs.models.encoder_decoder import (
    CachedPairs,
    EncoderDecoder,
    EncoderDecoderConfig,
    Pairs,
    PairsCache,
    encoder_decoder_shapes,
    generate_targets,
    load_encoder_decoder,
    save_encoder_decoder,
    shaped_encoder_decoder,
)
from jaxkfac.jobs.models.few_shot import (
    Conv4,
    CosineTransformer,
    CosineTransformerConfig,
    EpisodeNorm,
    PrototypicalNetwork,
    ResNet,
)
from jaxkfac.jobs.models.pretrained import smollm2

__all__ = [
    "MLP",
    "Cache",
    "Cached",
    "CachedPairs",
    "Conv4",
    "CosineTransformer",
    "CosineTransformerConfig",
    "Decoder",
    "DecoderConfig",
    "EncoderDecoder",
    "EncoderDecoderConfig",
    "EpisodeNorm",
    "Pairs",
    "PairsCache",
    "Pretrained",
    "PrototypicalNetwork",
    "ResNet",
    "Rotary",
    "Tokenizer",
    "Tokens",
    "VisionTransformer",
    "VisionTransformerConfig",
    "byte_tokenizer",
    "decoder_shapes",
    "empty_cache",
    "encoder_decoder_shapes",
    "generate",
    "generate_targets",
    "load_decoder",
    "load_encoder_decoder",
    "save_encoder_decoder",
    "shaped_encoder_decoder",
    "smollm2",
]
