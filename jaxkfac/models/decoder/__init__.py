"""A pretrained decoder in the Phi-3 layout."""

from jaxkfac.models.decoder._config import DecoderConfig
from jaxkfac.models.decoder._decoder import Decoder
from jaxkfac.models.decoder._generate import generate
from jaxkfac.models.decoder._load import decoder_shapes, load_decoder
from jaxkfac.models.decoder._rotary import Rotary
from jaxkfac.models.decoder._tokens import Cache, Cached, Tokens, empty_cache

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
]
