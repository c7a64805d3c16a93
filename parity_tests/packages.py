"""Packages beside PyTorch that some cases compare with."""

import importlib
import importlib.util
import sys
from typing import Any

import pytest


def imported(package: str) -> Any:
    """A package; without it the test is skipped.

    PEFT and pytorch_optimizer import transformers, which imports torchvision wherever that is. One
    that was built for another torch fails; then it is hidden, since no test here needs it.
    """
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; extra: test")
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError):
        sys.modules["torchvision"] = None  # pyright: ignore[reportArgumentType]
    return importlib.import_module(package)
