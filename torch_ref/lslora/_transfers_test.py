"""What adapters bring to the host: nothing."""

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from torch_ref.lslora import Config, attach, fourier_loss

CONFIG = Config(target=r".*_proj", rank=2, alpha=6.0)


# What copies between host and device, or waits for it: by function where a method is called,
# by operator where Python asks for a number in any other way.
TRANSFERS = {"cpu", "cuda", "item", "tolist", "numpy", "tensor", "as_tensor", "__bool__"}


class Functions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", str(func))
        everything = (*args, *(kwargs or {}).values())
        to_device = name == "to" and any(isinstance(a, str | torch.device) for a in everything)
        if name in TRANSFERS or to_device:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("_local_scalar_dense", "lift_fresh", "nonzero"):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def transfers(function):
    with Functions() as functions, Operators() as operators:
        function()
    return functions.found + operators.found


@pytest.mark.parametrize("placement", ["output", "bottleneck"])
def test_forward_and_backward_move_nothing(model, placement, x):
    attach(model, Config(".*_proj", fourier_placement=placement))
    assert transfers(lambda: model(x).square().sum().backward()) == []


def test_regulariser_does_not_wait_for_the_device(model):
    attach(model, CONFIG)
    assert transfers(lambda: fourier_loss(model).backward()) == []


def test_transfers_are_seen_by_this_spy():
    x = torch.ones(())
    assert transfers(lambda: x.item())
    assert transfers(lambda: float(x))
    assert transfers(lambda: bool(x > 0))
    assert transfers(lambda: x.cpu())
    assert transfers(lambda: x.to("cpu"))
    assert transfers(lambda: torch.tensor([0.0, 1.0]))
