"""The regulariser and the diagnostics of the active adapters."""

import math

import pytest
import torch
from torch.overrides import TorchFunctionMode

from torch_ref.lslora import Config, adapted_layers, attach, diagnose, fourier_loss, set_active

CONFIG = Config(target=r".*_proj", rank=2, alpha=6.0)


def test_regulariser_is_the_mean_over_layers_of_active_adapters(model):
    attach(model, CONFIG, name="first")
    attach(model, Config(r"blocks\.0\..*"), name="second")
    with torch.no_grad():
        for i, layer in enumerate(adapted_layers(model).values()):
            layer.fourier_params["first"].weight.copy_(torch.tensor([0.0, 1.0, i, 0.0]))
    set_active(model, "first")
    assert fourier_loss(model).item() == pytest.approx((0 + 1 + 4 + 9) / 4 / 4)
    set_active(model, "second")
    assert fourier_loss(model).item() == 0.0
    set_active(model)
    with pytest.raises(ValueError, match="no adapter is active"):
        fourier_loss(model)


def test_regulariser_pulls_coefficients_to_the_first_ones(model, randomize):
    attach(model, CONFIG)
    randomize(model)
    fourier_loss(model).backward()
    params = adapted_layers(model)["blocks.0.q_proj"].fourier_params["default"]
    expected = 2 * (params.weight - torch.tensor([0.0, 1, 0, 0])) / 4 / 4
    torch.testing.assert_close(params.weight.grad, expected.detach())
    assert params.sigma.grad is None


def test_diagnostics_are_plain_numbers(model):
    attach(model, CONFIG)
    with torch.no_grad():
        params = adapted_layers(model)["blocks.1.o_proj"].fourier_params["default"]
        params.weight.copy_(torch.tensor([0.5, 1.25, -0.25, 2.0]))
        params.sigma.copy_(torch.tensor(1.5))
    found = diagnose(model)
    assert list(found)[-1] == "blocks.1.o_proj/default" and len(found) == 4
    assert found["blocks.1.o_proj/default"] == (
        (0.5, 1.25, -0.25, 2.0),
        1.5,
        (0.5 + 0.25 + 0.25 + 2.0) / 4,
        2.25,
        None,
    )


def test_saturated_fraction_counts_the_values_where_tanh_is_flat(model, x):
    attach(model, Config(r"blocks\.0\.q_proj", rank=2, fourier_placement="bottleneck"))
    layer = adapted_layers(model)["blocks.0.q_proj"]
    z = layer.lora_A["default"](x).detach().abs().flatten()
    with torch.no_grad():  # between two values of the batch: atanh(0.95) sigma is the middle of z
        middle = z.sort().values[4:6].mean()
        layer.fourier_params["default"].sigma.copy_(-middle / math.atanh(0.95))
    assert diagnose(model, x)["blocks.0.q_proj/default"].saturated == 0.5


def test_plain_lora_has_nothing_to_diagnose_or_regularise(model):
    attach(model, Config(r".*_proj", rank=2, fourier_placement="none"))
    assert diagnose(model) == {}
    with pytest.raises(ValueError, match="no adapter is active that has coefficients"):
        fourier_loss(model)


def test_diagnostics_build_no_graph(model):
    attach(model, CONFIG)
    seen = []

    class Graphs(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                seen.append(result.grad_fn)
            return result

    with Graphs():
        diagnose(model)
    assert seen and not any(seen)
