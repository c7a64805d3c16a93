"""Models that learn classes from a few images: backbones, prototypes, the cosine transformer."""

from jaxkfac.jobs.models.few_shot._backbones import Conv4, EpisodeNorm, ResNet
from jaxkfac.jobs.models.few_shot._cosine_transformer import (
    CosineTransformer,
    CosineTransformerConfig,
    PrototypicalNetwork,
)

__all__ = [
    "Conv4",
    "CosineTransformer",
    "CosineTransformerConfig",
    "EpisodeNorm",
    "PrototypicalNetwork",
    "ResNet",
]
