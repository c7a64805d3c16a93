"""Load, cast and place once; ask for room; say what ran out; watch peaks; find second copies."""

from jaxkfac.memory._budget import (
    MemoryBudgetError,
    bytes_text,
    free_bytes,
    free_host_bytes,
    require,
)
from jaxkfac.memory._cast import cast_once
from jaxkfac.memory._duplicates import Duplicate, DuplicateReport, duplicate_report
from jaxkfac.memory._environment import Finding, inspect_environment
from jaxkfac.memory._exhausted import explain_out_of_memory, is_out_of_memory
from jaxkfac.memory._load import load_safetensors
from jaxkfac.memory._place import place_once
from jaxkfac.memory._track import Peak, Stage, track

__all__ = [
    "Duplicate",
    "DuplicateReport",
    "Finding",
    "MemoryBudgetError",
    "Peak",
    "Stage",
    "bytes_text",
    "cast_once",
    "duplicate_report",
    "explain_out_of_memory",
    "free_bytes",
    "free_host_bytes",
    "inspect_environment",
    "is_out_of_memory",
    "load_safetensors",
    "place_once",
    "require",
    "track",
]
