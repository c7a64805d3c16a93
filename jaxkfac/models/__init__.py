"""Models in flax NNX."""

from jaxkfac.models._mlp import MLP
from jaxkfac.models._vision_transformer import VisionTransformer, VisionTransformerConfig

__all__ = ["MLP", "VisionTransformer", "VisionTransformerConfig"]
