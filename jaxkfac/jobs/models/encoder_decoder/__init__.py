"""A pretrained encoder-decoder in the T5 layout."""

from jaxkfac.jobs.models.encoder_decoder._answers import generate_targets
from jaxkfac.jobs.models.encoder_decoder._blocks import (
    CachedPairs,
    Pairs,
    PairsCache,
    empty_pairs_cache,
)
from jaxkfac.jobs.models.encoder_decoder._config import EncoderDecoderConfig
from jaxkfac.jobs.models.encoder_decoder._encoder_decoder import EncoderDecoder
from jaxkfac.jobs.models.encoder_decoder._load import (
    encoder_decoder_shapes,
    load_encoder_decoder,
    save_encoder_decoder,
    shaped_encoder_decoder,
)

__all__ = [
    "CachedPairs",
    "EncoderDecoder",
    "EncoderDecoderConfig",
    "Pairs",
    "PairsCache",
    "empty_pairs_cache",
    "encoder_decoder_shapes",
    "generate_targets",
    "load_encoder_decoder",
    "save_encoder_decoder",
    "shaped_encoder_decoder",
]
