"""Plan the memory of a training from shapes, and find what to change so that it fits."""

from jaxkfac.planning._compilers import (
    TARGETS,
    CompiledBytes,
    CompilerTarget,
    TargetName,
    compiled_bytes,
    is_installed,
    program_work,
    target_of,
)
from jaxkfac.planning._layouts import (
    PRESETS,
    DecoderLayout,
    EncoderDecoderLayout,
    Preset,
    preset,
    shaped,
)
from jaxkfac.planning._memory_plan import MemoryPlan
from jaxkfac.planning._options import OPTION_NAMES
from jaxkfac.planning._plan import plan_memory
from jaxkfac.planning._program_bytes import IN_TURN
from jaxkfac.planning._search import MemoryEstimate

__all__ = [
    "IN_TURN",
    "OPTION_NAMES",
    "PRESETS",
    "TARGETS",
    "CompiledBytes",
    "CompilerTarget",
    "DecoderLayout",
    "EncoderDecoderLayout",
    "MemoryEstimate",
    "MemoryPlan",
    "Preset",
    "TargetName",
    "compiled_bytes",
    "is_installed",
    "plan_memory",
    "preset",
    "program_work",
    "shaped",
    "target_of",
]
