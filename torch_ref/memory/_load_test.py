"""A model is loaded once: one dtype, one copy, every name accounted for."""

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from torch_ref.memory import load_once


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loaded_model_has_the_saved_values_in_the_target_dtype(saved, dtype, build):
    model, file = saved
    loaded = load_once(build, file, dtype=dtype)
    for name, tensor in model.state_dict().items():
        expected = tensor.to(dtype) if tensor.is_floating_point() else tensor
        assert torch.equal(loaded.state_dict()[name], expected)
        assert loaded.state_dict()[name].dtype == expected.dtype
    assert loaded.head.weight is loaded.embed.weight
    tokens = torch.tensor([1, 4, 5])
    assert loaded(tokens).shape == (3, 6)


class Factories(TorchFunctionMode):
    """Counts conversions and the elements that are allocated with values."""

    def __init__(self):
        super().__init__()
        self.casts = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.casts += getattr(func, "__name__", "") == "to"
        return func(*args, **(kwargs or {}))


def test_stored_dtype_is_not_converted(saved, build):
    _, file = saved
    with Factories() as counted:
        load_once(build, file, dtype=torch.float32)
    assert counted.casts == 0
    with Factories() as counted:
        load_once(build, file, dtype=torch.bfloat16)
    assert counted.casts == 5  # one weight of two names, and four of the normalisation


def test_model_is_built_without_memory(build, saved):
    devices = []

    def watched():
        model = build()
        devices.extend(p.device.type for p in model.parameters())
        return model

    load_once(watched, saved[1], dtype=torch.float32)
    assert set(devices) == {"meta"}


def test_names_that_differ_are_all_named(saved):
    with pytest.raises(ValueError, match=r"lacks \['extra.weight'\] and has \['norm"):
        load_once(
            lambda: nn.ModuleDict({"embed": nn.Embedding(6, 4), "extra": nn.Linear(1, 1, False)}),
            saved[1],
            dtype=torch.float32,
        )


def test_shape_that_differs_is_named(tmp_path):
    safetensors.torch.save_file({"weight": torch.ones(2, 3)}, tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match=r"'weight' has shape \(2, 3\) in .* and \(3, 2\)"):
        load_once(
            lambda: nn.Linear(2, 3, bias=False), tmp_path / "m.safetensors", dtype=torch.float32
        )


def test_buffer_that_no_file_holds_is_named(saved, build):
    class Rotary(build):
        def __init__(self):
            super().__init__()
            self.register_buffer("frequencies", torch.ones(3), persistent=False)

    with pytest.raises(ValueError, match=r"\['frequencies'\].*no file holds them"):
        load_once(Rotary, saved[1], dtype=torch.float32)
