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
