"""What curvature is for: influence functions."""

from jaxkfac.uses._influence import influence
from jaxkfac.uses._self_influence import self_influence
from jaxkfac.uses._top_k import TopK

__all__ = ["TopK", "influence", "self_influence"]
