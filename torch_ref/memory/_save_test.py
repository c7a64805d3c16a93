"""What is freed before saving, and what recomputation leaves as it was."""

import pytest
import safetensors.torch
import torch
from torch import nn

from torch_ref.memory import Recomputed, release_cache, save_after_cleanup
from torch_ref.memory import _save as save_module


def test_gradients_go_before_the_file_is_written(tmp_path, monkeypatch):
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    events = []
    monkeypatch.setattr(
        save_module, "release_cache", lambda: events.append(model.weight.grad is None)
    )
    save_after_cleanup(model, tmp_path / "m.safetensors")
    assert events == [True]
    assert safetensors.torch.load_file(tmp_path / "m.safetensors").keys() == {"weight", "bias"}


def test_tied_weight_is_written_once(saved):
    stored = safetensors.torch.load_file(saved[1])
    assert "embed.weight" in stored and "head.weight" not in stored


def test_recomputed_block_has_the_same_gradients_and_runs_twice():
    torch.manual_seed(0)
    runs = []
    block = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    block.register_forward_pre_hook(lambda *_: runs.append(True))
    x = torch.randn(2, 3)
    block(x).square().sum().backward()
    expected, block[0].weight.grad = block[0].weight.grad, None
    runs.clear()
    Recomputed(block)(x).square().sum().backward()  # no input requires a gradient
    torch.testing.assert_close(block[0].weight.grad, expected)
    assert len(runs) == 2


@pytest.mark.slow
def test_cache_is_emptied_where_there_is_one(monkeypatch):
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    for available in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        release_cache()
        assert emptied == [True] * available
