"""Accumulation over batches of the same size saves nothing, and its first step comes early."""

import pytest
import torch
from torch import nn

from torch_ref import unfixed
from torch_ref.accumulation import accumulated_training
from torch_ref.memory import track_storages

ROWS, WIDTH, BLOCKS = 64, 12, 3
GRADIENT = BLOCKS * WIDTH * WIDTH * 4  # bytes
X = torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH).sin()


def build():
    torch.manual_seed(0)
    layers = [
        layer for _ in range(BLOCKS) for layer in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())
    ]
    model = nn.Sequential(*layers)
    return model, torch.optim.SGD(model.parameters(), 0.1)


def loss(model, batch):
    return model(batch).square().mean()


def test_without_accumulation_it_is_ordinary_training():
    batches = [X, 2 * X, 3 * X]
    model, optimizer = build()
    assert unfixed.train(model, optimizer, loss, batches, zero_grad=True) == [0, 1, 2]
    expected, optimizer = build()
    list(accumulated_training(expected, optimizer, loss, batches, every=1))
    for p, q in zip(model.parameters(), expected.parameters()):
        torch.testing.assert_close(p, q)


def test_first_step_is_made_after_one_batch_with_a_part_of_its_gradient():
    model, optimizer = build()
    first = [p.detach().clone() for p in model.parameters()]
    gradients = torch.autograd.grad(loss(model, X), list(model.parameters()))
    assert unfixed.train(model, optimizer, loss, [X], every=4) == [0]
    for p, before, gradient in zip(model.parameters(), first, gradients):
        torch.testing.assert_close(p, before - 0.1 * gradient / 4)
    assert unfixed.train(model, optimizer, loss, [X] * 9, every=4) == [0, 4, 8]


def test_without_zero_grad_a_step_has_the_sum_of_all_gradients():
    kept = []
    for zero_grad in (False, True):
        model, optimizer = build()
        optimizer.param_groups[0]["lr"] = 0.0
        unfixed.train(model, optimizer, loss, [X] * 4, every=2, zero_grad=zero_grad)
        kept.append(model[0].weight.grad)
    # Half a gradient for each batch: all four, or the one after the step at batch 2.
    torch.testing.assert_close(kept[0], 4 * kept[1])


@pytest.mark.parametrize("zero_grad", [False, True])
@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.AdamW])
def test_batches_of_the_same_size_save_nothing(optimizer_class, zero_grad):
    peaks = {}
    for every in (1, 4, 8):
        model, _ = build()
        optimizer = optimizer_class(model.parameters(), 0.1)
        with track_storages() as made:
            unfixed.train(model, optimizer, loss, [X] * 9, every=every, zero_grad=zero_grad)
        peaks[every] = made.peak_bytes
    assert peaks[8] == peaks[4] >= peaks[1]
    if zero_grad:  # accumulated gradients outlive the step that one batch alone would end with
        assert 0 < peaks[4] - peaks[1] <= GRADIENT


def test_cache_is_cleared_at_its_multiples(monkeypatch):
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    model, optimizer = build()
    unfixed.train(model, optimizer, loss, [X] * 12)
    assert not emptied
    unfixed.train(model, optimizer, loss, [X] * 12, clear_cache_every=10)
    assert len(emptied) == 2  # at 0 and 10
