"""Load, cast and move a model once; find second copies; free before saving; count bytes."""

from torch_ref.memory._checkpointing import Recomputed
from torch_ref.memory._convert import cast_once, place_once
from torch_ref.memory._duplicates import Duplicate, find_duplicates, live_tensors
from torch_ref.memory._load import load_once
from torch_ref.memory._release import release_cache
from torch_ref.memory._save import save_after_cleanup
from torch_ref.memory._storages import track_storages

__all__ = [
    "Duplicate",
    "Recomputed",
    "cast_once",
    "find_duplicates",
    "live_tensors",
    "load_once",
    "place_once",
    "release_cache",
    "save_after_cleanup",
    "track_storages",
]
