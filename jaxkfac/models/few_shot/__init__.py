"""Models that learn a class from a few images: backbones, prototypes, the cosine transformer."""

from jaxkfac.models.few_shot._conv4 import Conv4
from jaxkfac.models.few_shot._cosine_transformer import CosineTransformer, CosineTransformerConfig
from jaxkfac.models.few_shot._episode_norm import EpisodeNorm
from jaxkfac.models.few_shot._prototypes import PrototypicalNetwork
from jaxkfac.models.few_shot._resnet import ResNet

__all__ = [
    "Conv4",
    "CosineTransformer",
    "CosineTransformerConfig",
    "EpisodeNorm",
    "PrototypicalNetwork",
    "ResNet",
]
