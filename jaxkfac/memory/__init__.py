"""Loading, casting and placing without copies; free memory, peaks, duplicates, processes."""

from jaxkfac.memory._budget import (
    TROUBLESHOOTING_PAGE,
    ByteSize,
    MemoryBudgetError,
    bytes_text,
    explain_out_of_memory,
    free_bytes,
    free_host_bytes,
    is_out_of_memory,
    parse_bytes,
    require,
    resident_bytes,
    what_was_short,
)
from jaxkfac.memory._duplicates import Duplicate, DuplicateReport, duplicate_report
from jaxkfac.memory._environment import Finding, inspect_environment
from jaxkfac.memory._leaves import Target, aligned_empty, check_targets, check_values
from jaxkfac.memory._load import LeafSharding, load_safetensors, stored_tensors
from jaxkfac.memory._place import (
    as_sharding,
    cast_once,
    checked_dtype,
    divided_shardings,
    place_once,
    put_leaf,
)
from jaxkfac.memory._processes import (
    ProcessGroup,
    check_same_batch,
    in_equal_shares,
    initialize_distributed,
    join_processes,
    note_on_cpus,
    whole_here,
)
from jaxkfac.memory._track import Peak, Stage, track

__all__ = [
    "TROUBLESHOOTING_PAGE",
    "ByteSize",
    "Duplicate",
    "DuplicateReport",
    "Finding",
    "LeafSharding",
    "MemoryBudgetError",
    "Peak",
    "ProcessGroup",
    "Stage",
    "Target",
    "aligned_empty",
    "as_sharding",
    "bytes_text",
    "cast_once",
    "check_same_batch",
    "check_targets",
    "check_values",
    "checked_dtype",
    "divided_shardings",
    "duplicate_report",
    "explain_out_of_memory",
    "free_bytes",
    "free_host_bytes",
    "in_equal_shares",
    "initialize_distributed",
    "inspect_environment",
    "is_out_of_memory",
    "join_processes",
    "load_safetensors",
    "note_on_cpus",
    "parse_bytes",
    "place_once",
    "put_leaf",
    "require",
    "resident_bytes",
    "stored_tensors",
    "track",
    "what_was_short",
    "whole_here",
]
