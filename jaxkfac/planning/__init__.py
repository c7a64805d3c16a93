"""Plan the memory of a training from shapes, and find what to change so that it fits."""

from jaxkfac.planning._levers import LEVERS, Lever
from jaxkfac.planning._plan import MemoryPlan, plan_memory
from jaxkfac.planning._presets import (
    PRESETS,
    DecoderLayout,
    EncoderDecoderLayout,
    Preset,
    preset,
    shaped,
)
from jaxkfac.planning._search import Need

__all__ = [
    "LEVERS",
    "PRESETS",
    "DecoderLayout",
    "EncoderDecoderLayout",
    "Lever",
    "MemoryPlan",
    "Need",
    "Preset",
    "plan_memory",
    "preset",
    "shaped",
]
