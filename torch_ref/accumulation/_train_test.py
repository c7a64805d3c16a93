"""Accumulated training takes the steps of the big batch."""

import pytest
import torch
from torch import nn

from torch_ref import memory
from torch_ref.accumulation import accumulated_training

X = torch.linspace(-1, 1, 20 * 3, dtype=torch.float64).reshape(20, 3).sin()
Y = X.sum(1, keepdim=True).cos()

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
}


def loss(model, batch):
    x, y = batch
    return (model(x) - y).square().mean()


def build(optimizer="sgd"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    return model, OPTIMIZERS[optimizer](model.parameters())


def micro_batches(sizes):
    start = 0
    for size in sizes:
        yield X[start : start + size], Y[start : start + size]
        start += size


def big_steps(groups, optimizer):
    """One step on each group's rows together."""
    model, optimizer = build(optimizer)
    losses, start = [], 0
    for size in groups:
        optimizer.zero_grad()
        value = loss(model, (X[start : start + size], Y[start : start + size]))
        value.backward()
        optimizer.step()
        losses.append(value.item())
        start += size
    return model, losses


def assert_same_model(first, second):
    for a, b in zip(first.parameters(), second.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_accumulation_takes_the_big_batches_steps(optimizer):
    model, steps = build(optimizer)
    losses = list(accumulated_training(model, steps, loss, micro_batches([2] * 6), every=3))
    expected, big = big_steps([6, 6], optimizer)
    assert_same_model(model, expected)
    assert losses == pytest.approx(big, rel=1e-12)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_last_incomplete_group_is_a_step_of_its_own_size(optimizer):
    model, steps = build(optimizer)
    losses = list(accumulated_training(model, steps, loss, micro_batches([2] * 5), every=3))
    expected, big = big_steps([6, 4], optimizer)
    assert_same_model(model, expected)
    assert losses == pytest.approx(big, rel=1e-12)


def test_uneven_micro_batches_weigh_their_loss_terms():
    model, steps = build()
    run = accumulated_training(
        model,
        steps,
        loss,
        micro_batches([5, 1, 2, 3, 4]),
        every=3,
        loss_terms=lambda batch: len(batch[0]),
    )
    losses = list(run)
    expected, big = big_steps([8, 7], "sgd")
    assert_same_model(model, expected)
    assert losses == pytest.approx(big, rel=1e-12)


def masked_loss(model, batch):
    x, y, mask = batch
    return ((model(x) - y).square() * mask).sum() / mask.sum()


def test_micro_batch_without_loss_terms_changes_nothing():
    batches = [(x, y, torch.ones(2, 1)) for x, y in micro_batches([2, 2])]
    masked = (X[4:6], Y[4:6], torch.zeros(2, 1))  # its loss is 0 / 0
    found = []
    for group in (batches, [batches[0], masked, batches[1]]):
        model, steps = build()
        options = {"every": len(group), "loss_terms": lambda batch: int(batch[2].sum())}
        losses = list(accumulated_training(model, steps, masked_loss, group, **options))
        found.append((losses, model))
    assert found[1][0] == found[0][0]
    assert_same_model(found[1][1], found[0][1])
    assert torch.isfinite(found[0][1][0].weight).all()


def test_means_of_uneven_means_are_another_step():
    model, steps = build()
    list(accumulated_training(model, steps, loss, micro_batches([5, 1, 2]), every=3))
    expected, _ = big_steps([8], "sgd")
    assert not torch.allclose(model[0].weight, expected[0].weight, rtol=1e-6)


def test_gradients_are_gone_between_steps():
    model, steps = build()
    model[0].weight.grad = torch.ones_like(model[0].weight)  # left over from something else
    for _ in accumulated_training(model, steps, loss, micro_batches([2] * 4), every=2):
        assert all(p.grad is None for p in model.parameters())
    expected, _ = big_steps([4, 4], "sgd")
    assert_same_model(model, expected)


def test_cache_is_cleared_every_so_many_steps(monkeypatch):
    cleared = []
    monkeypatch.setattr(memory, "release_cache", lambda: cleared.append(True))
    model, steps = build()
    run = accumulated_training(
        model, steps, loss, micro_batches([1] * 14), every=2, clear_cache_every=3
    )
    assert [len(cleared) for _ in run] == [0, 0, 1, 1, 1, 2, 2]


def test_micro_batches_are_read_one_group_at_a_time():
    read = []

    def stream():
        for i, batch in enumerate(micro_batches([1] * 6)):
            read.append(i)
            yield batch

    model, steps = build()
    next(accumulated_training(model, steps, loss, stream(), every=2))
    assert read == [0, 1]


def test_a_group_without_loss_terms_is_refused():
    model, steps = build()
    run = accumulated_training(
        model, steps, loss, micro_batches([1, 1]), every=2, loss_terms=lambda batch: 0
    )
    with pytest.raises(ValueError, match=r"no loss terms: \[0, 0\]"):
        list(run)


@pytest.mark.parametrize("options", [{"every": 0}, {"every": 1, "clear_cache_every": 0}])
def test_periods_below_one_are_refused(options):
    model, steps = build()
    with pytest.raises(ValueError, match="expected every >= 1"):
        list(accumulated_training(model, steps, loss, [], **options))
