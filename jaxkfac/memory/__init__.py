"""Load, cast and place once; ask for room; watch peaks; find second copies."""

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
    "free_bytes",
    "free_host_bytes",
    "inspect_environment",
    "load_safetensors",
    "place_once",
    "require",
    "track",
]
