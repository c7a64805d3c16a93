"""A model with layers to adapt, and adapters that do something."""

import pytest
import torch
from torch import nn

from torch_ref.lslora import adapted_layers


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(4, 6)
        self.o_proj = nn.Linear(6, 4, bias=False)
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        return self.norm(self.o_proj(self.q_proj(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@pytest.fixture
def build():
    """Builds a model, with the same weights every time."""

    def build():
        torch.manual_seed(0)
        return Net()

    return build


@pytest.fixture
def model(build):
    return build()


@pytest.fixture
def randomize():
    """Moves every adapter of a model away from its first values."""

    def randomize(model, seed=0):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for layer in adapted_layers(model).values():
                for part in (layer.lora_A, layer.lora_B, layer.fourier_params):
                    for p in part.parameters():
                        p.add_(0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype))

    return randomize


@pytest.fixture
def x():
    return torch.linspace(-1, 1, 20).reshape(5, 4).sin()
