"""A pretrained decoder in the Phi-3 layout."""

from jaxkfac.jobs.models.decoder._attention import Cache, Cached, Tokens, empty_cache
from jaxkfac.jobs.models.decoder._config import DecoderConfig
from jaxkfac.jobs.models.decoder._decoder import Decoder
from jaxkfac.jobs.models.decoder._generate import generate
from jaxkfac.jobs.models.decoder._load import decoder_shapes, load_decoder, shaped_decoder
from jaxkfac.jobs.models.decoder._rotary import Rotary

__all__ = [
    "Cache",
    "Cached",
    "Decoder",
    "DecoderConfig",
    "Rotary",
    "Tokens",
    "decoder_shapes",
    "empty_cache",
    "generate",
    "load_decoder",
    "shaped_decoder",
]
