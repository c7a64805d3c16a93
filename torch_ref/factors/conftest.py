"""Two models: rows that are examples, and rows that are tokens."""

import pytest
import torch
from torch import nn

N, S, VOCABULARY = 6, 4, 7


class Tokens(nn.Module):
    """Embedding, two layers that act on each token, one that mixes them, a head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 3)
        self.up = nn.Linear(3, 5)
        self.down = nn.Linear(5, 3, bias=False)
        self.mix = nn.Conv1d(3, 3, 3, padding=1)
        self.head = nn.Linear(3, VOCABULARY)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.down(torch.tanh(self.up(x)))
        return self.head(self.mix(x.mT).mT)


@pytest.fixture
def mlp():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    return model, (torch.randn(N, 4, dtype=torch.float64), torch.arange(N) % 3)


@pytest.fixture
def tokens():
    torch.manual_seed(0)
    model = Tokens().double()
    x = torch.randint(VOCABULARY, (N, S))
    return model, (x, torch.randint(VOCABULARY, (N, S)))
