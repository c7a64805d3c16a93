"""The reference's tests: problems so small that a second thread costs more than it does."""

import importlib
import importlib.util
import sys

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def _transformers():
    """Hugging Face's packages, where they are installed.

    They import torchvision wherever it is installed. One that was built for another torch
    fails; then it is hidden from them, since no test here needs it.
    """
    for package in ("transformers", "peft"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed; extra: peft")
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError):
        sys.modules["torchvision"] = None
