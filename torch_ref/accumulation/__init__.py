"""Gradient accumulation, and allocator settings that must come before torch."""

from torch_ref.accumulation._allocator import configure_allocator
from torch_ref.accumulation._train import accumulated_training

__all__ = ["accumulated_training", "configure_allocator"]
