"""Models written again, so that jaxkfac's can be held to them layer by layer."""

from torch_ref.models._encoder_decoder import EncoderDecoder, EncoderDecoderSizes
from torch_ref.models._few_shot import Conv4, CosineTransformer, PrototypicalNetwork, ResNet

__all__ = [
    "Conv4",
    "CosineTransformer",
    "EncoderDecoder",
    "EncoderDecoderSizes",
    "PrototypicalNetwork",
    "ResNet",
]
