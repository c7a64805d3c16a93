"""A model is cast and moved only where it differs, one tensor at a time."""

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from torch_ref.memory import cast_once, place_once


def test_cast_converts_what_differs_once_and_nothing_after(build):
    model = build()
    weight = model.embed.weight
    assert cast_once(model, torch.bfloat16) == 5
    places = {n: t.data_ptr() for n, t in model.state_dict().items()}
    assert cast_once(model, torch.bfloat16) == 0
    assert places == {n: t.data_ptr() for n, t in model.state_dict().items()}
    assert model.embed.weight is weight and model.head.weight is weight
    assert weight.dtype == torch.bfloat16
    assert model.norm.num_batches_tracked.dtype == torch.int64


def test_cast_drops_each_old_copy_before_the_next_is_made():
    model = nn.Sequential(*[nn.Linear(3, 3, bias=False) for _ in range(4)])
    old = [p.data.untyped_storage()._weak_ref() for p in model.parameters()]
    alive = []

    class Casts(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if getattr(func, "__name__", "") == "to":
                alive.append(sum(not torch.UntypedStorage._expired(ref) for ref in old))
            return func(*args, **(kwargs or {}))

    with Casts():
        cast_once(model, torch.float64)
    assert alive == [4, 3, 2, 1]
    for ref in old:
        torch.UntypedStorage._free_weak_ref(ref)


def test_gradients_go_with_the_old_copy():
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    cast_once(model, torch.float64)
    assert model.weight.grad is None
    model(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
    assert model.weight.grad.dtype == torch.float64


def test_cast_to_integers_is_refused(build):
    with pytest.raises(ValueError, match=r"torch\.int8"):
        cast_once(build(), torch.int8)


def test_move_touches_each_tensor_that_is_elsewhere_once(build):
    model = build()
    targets = []

    class Moves(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if getattr(func, "__name__", "") == "to":
                targets.append(args[1])
                return args[0].clone()  # there need not be a GPU
            return func(*args, **(kwargs or {}))

    with Moves():
        assert place_once(model, "cpu") == 0
        assert place_once(model, "cuda:0") == 6
    assert targets == [torch.device("cuda:0")] * 6
    assert model.head.weight is model.embed.weight


@pytest.mark.gpu
def test_the_current_gpu_is_one_place_under_two_names(build):
    model = build()
    assert place_once(model, "cuda") == 6
    assert place_once(model, f"cuda:{torch.cuda.current_device()}") == 0
