"""A model with a tied weight and an integer buffer, and its file."""

import pytest
import torch
from torch import nn

from torch_ref.memory import save_after_cleanup


class Tied(nn.Module):
    """An embedding that is also the head, and a normalisation with integer buffers."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.norm(self.embed(tokens)))


@pytest.fixture
def build():
    """The model's class: a call builds one."""
    return Tied


@pytest.fixture
def saved(build, tmp_path):
    torch.manual_seed(0)
    model = build()
    save_after_cleanup(model, tmp_path / "model.safetensors")
    return model, tmp_path / "model.safetensors"
