"""Models written again, so that jaxkfac's can be held to them layer by layer."""

from torch_ref.models._encoder_decoder import EncoderDecoder, EncoderDecoderSizes

__all__ = ["EncoderDecoder", "EncoderDecoderSizes"]
