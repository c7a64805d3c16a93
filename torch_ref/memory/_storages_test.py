"""Bytes and operations are those of arithmetic: each test derives its numbers from the shapes."""

import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torch_ref.memory import track_storages

FLOAT = 4  # bytes
ROWS, WIDTH = 50, 20
ACTIVATION = ROWS * WIDTH * FLOAT


def test_storage_counts_once_however_many_tensors_share_it():
    with track_storages() as made:
        x = torch.ones(6, 10)
        views = [x.t(), x[1:], x.view(-1), x.detach(), x.unbind()]
        x.add_(1).mul_(2)
    assert made.peak_bytes == made.live_bytes == 60 * FLOAT
    del x
    assert made.live_bytes == 60 * FLOAT
    views.clear()
    assert made.live_bytes == 0
    assert made.peak_bytes == 60 * FLOAT


def test_peak_is_of_what_was_alive_at_once():
    with track_storages() as made:
        for _ in range(5):
            x = torch.ones(100)  # the last one is alive until this one exists
    assert made.peak_bytes == 2 * 100 * FLOAT
    assert made.live_bytes == 100 * FLOAT
    made.reset_peak()
    assert made.peak_bytes == 100 * FLOAT
    del x
    assert made.live_bytes == 0


def test_what_was_made_before_the_block_never_counts():
    x, out = torch.ones(10), torch.empty(10)
    with track_storages() as made:
        y = x[2:]
        torch.add(x, x, out=out)
        x.mul_(2)
        x.to(torch.float32).cpu().contiguous()
        del x
    assert y is not None
    assert made.peak_bytes == made.live_bytes == 0


def test_resized_storage_counts_with_its_new_size():
    with track_storages() as made:
        x = torch.empty(3)
        torch.ones(7, out=x.resize_(0))
    assert made.live_bytes == 7 * FLOAT


def test_several_outputs_and_lists_count():
    with track_storages() as made:
        values, vectors = torch.linalg.eigh(torch.eye(4))
        pairs = torch._foreach_add([values, vectors], 1.0)
    assert made.live_bytes == 2 * (4 + 16) * FLOAT
    del pairs


def test_saved_activation_lives_until_its_backward_pass():
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())
    x = torch.ones(ROWS, WIDTH)
    weight = WIDTH * WIDTH * FLOAT
    with track_storages() as made:
        loss = block(x).sum()  # tanh saves its output; the product goes at once
        assert made.live_bytes == ACTIVATION + FLOAT
        assert made.peak_bytes == 2 * ACTIVATION
        loss.backward(retain_graph=True)
        assert made.live_bytes == ACTIVATION + FLOAT + weight
        loss.backward()
        assert made.live_bytes == FLOAT + weight
        block.zero_grad(set_to_none=True)
        assert made.live_bytes == FLOAT


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations_are_not_alive_between_the_passes(reentrant):
    block = nn.Sequential(*[nn.Tanh() for _ in range(4)])
    x = torch.ones(ROWS, WIDTH, requires_grad=True)
    with track_storages() as made:
        kept = block(x)
        assert made.live_bytes == 4 * ACTIVATION
        del kept
        assert made.live_bytes == 0
        recomputed = checkpoint(block, x, use_reentrant=reentrant)
        assert made.live_bytes == ACTIVATION
        assert made.calls["tanh"] == 8
        recomputed.sum().backward()
        assert made.calls["tanh"] == 12
        del recomputed
        gc.collect()
        assert made.live_bytes == ACTIVATION  # x.grad


def test_conversion_in_place_frees_each_old_parameter():
    sizes = (30, 30)
    one = sizes[0] * sizes[1] + sizes[0]
    with track_storages() as made:
        model = nn.Sequential(*[nn.Linear(*sizes) for _ in range(3)])
        assert made.live_bytes == 3 * one * FLOAT
        made.reset_peak()
        model.to(torch.bfloat16)
        assert made.live_bytes == 3 * one * 2
        # The first weight, in both dtypes; all that follows is less.
        assert made.peak_bytes == 3 * one * FLOAT + sizes[0] * sizes[1] * 2
    assert made.calls["_to_copy"] == 6


def test_reading_a_number_and_making_one_are_counted():
    x = torch.ones(3)
    with track_storages() as made:
        x.sum().item()
        float(x[0])
        bool(x[0] > 0)
        torch.tensor([1.0, 2.0])
        0.0 + x.sum()
    assert made.calls["_local_scalar_dense"] == 3
    assert made.host_tensors == 1
    assert made.calls["sum"] == 2


def test_tensor_of_python_numbers_counts_with_its_bytes():
    with track_storages() as made:
        x = torch.tensor([1.0, 2.0])
    assert made.live_bytes == 2 * FLOAT
    del x


def test_meta_tensors_have_no_bytes_and_other_devices_may_be_left_out():
    with track_storages() as made, track_storages("cuda") as elsewhere:
        x = torch.ones(1000, device="meta")
        y = torch.ones(10)
    assert (made.live_bytes, elsewhere.live_bytes) == (10 * FLOAT, 0)
    assert made.calls["ones"] == elsewhere.calls["ones"] == 2
    del x, y


@pytest.mark.slow
def test_cycle_is_alive_until_it_is_collected():
    gc.collect()
    with track_storages() as made:
        x = torch.ones(10)
        cycle = [x]
        cycle.append(cycle)
        del x, cycle
        assert made.live_bytes == 10 * FLOAT
        gc.collect()
        assert made.live_bytes == 0


@pytest.mark.gpu
def test_backward_pass_on_a_gpu_counts_in_its_thread():
    x = torch.ones(ROWS, WIDTH, device="cuda", requires_grad=True)
    with track_storages("cuda") as made:
        loss = x.tanh().sum()
        assert made.live_bytes == ACTIVATION + FLOAT
        loss.backward()
        assert made.live_bytes == FLOAT + ACTIVATION  # x.grad
        host = x.grad.cpu()
        assert made.live_bytes == FLOAT + ACTIVATION
    assert made.calls["tanh_backward"] == 1 and host.device.type == "cpu"
