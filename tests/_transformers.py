"""Hugging Face's transformers, imported where a torchvision for another torch lies beside it."""

import importlib
import importlib.util
import sys

import pytest

for _package in ("torch", "transformers"):
    if importlib.util.find_spec(_package) is None:
        pytest.skip(f"{_package} is not installed", allow_module_level=True)
try:
    importlib.import_module("torchvision")
except (ImportError, RuntimeError):
    # transformers imports it wherever it finds it, and one built for another torch fails. Hidden
    # before transformers is imported, which asks once.
    sys.modules["torchvision"] = None  # type: ignore[assignment]

torch = importlib.import_module("torch")
transformers = importlib.import_module("transformers")
torch.set_num_threads(1)  # problems so small that a second thread costs more than it does

# A decoder of the smallest sizes, for any of its configs; ids 0 to 2 are special.
SIZES = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
