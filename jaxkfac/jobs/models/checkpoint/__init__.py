"""Checkpoints in Hugging Face's layout: config, tensors, tokenizer, and loaded parameters."""

from jaxkfac.jobs.models.checkpoint._fill import (
    HeadTensors,
    Leaf,
    Shape,
    Source,
    StoredHead,
    TensorSpec,
    alone,
    fill,
    fill_shapes,
    stored_head,
)
from jaxkfac.jobs.models.checkpoint._folder import (
    Pretrained,
    TiedApply,
    open_weights,
    read_config,
    save_folder,
    token_ids,
)
from jaxkfac.jobs.models.checkpoint._tokenizer import (
    Tokenizer,
    byte_tokenizer,
    read_json,
    tokenizers_package,
)

__all__ = [
    "HeadTensors",
    "Leaf",
    "Pretrained",
    "Shape",
    "Source",
    "StoredHead",
    "TensorSpec",
    "TiedApply",
    "Tokenizer",
    "alone",
    "byte_tokenizer",
    "fill",
    "fill_shapes",
    "open_weights",
    "read_config",
    "read_json",
    "save_folder",
    "stored_head",
    "token_ids",
    "tokenizers_package",
]
