"""Checkpoints in Hugging Face's layout: config, tensors, tokenizer, and the parameters filled."""

from jaxkfac.models.checkpoint._byte_tokenizer import byte_tokenizer
from jaxkfac.models.checkpoint._fill import Source, fill, fill_shapes
from jaxkfac.models.checkpoint._folder import open_weights, read_config, token_ids
from jaxkfac.models.checkpoint._json_file import read_json
from jaxkfac.models.checkpoint._leaf import Leaf, Shape, TensorSpec, alone, check_tensors
from jaxkfac.models.checkpoint._pretrained import Pretrained
from jaxkfac.models.checkpoint._save import save_folder
from jaxkfac.models.checkpoint._tokenizer import Tokenizer, tokenizers_package

__all__ = [
    "Leaf",
    "Pretrained",
    "Shape",
    "Source",
    "TensorSpec",
    "Tokenizer",
    "alone",
    "byte_tokenizer",
    "check_tensors",
    "fill",
    "fill_shapes",
    "open_weights",
    "read_config",
    "read_json",
    "save_folder",
    "token_ids",
    "tokenizers_package",
]
